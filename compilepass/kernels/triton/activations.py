"""Activations on Triton: of gates in a tensor of their own or in a half of one, and of no gate.

An activation has up to two numbers, ``by`` and ``limit``; what they mean is its own affair.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .rows import block_of, by_rows, outputs, rounded, spaced, tuned
from .sinks import Sink, quantised_ops, store_row

__all__ = [
    "QUANTISED",
    "fatrelu_and_mul",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_mul",
    "gelu_new",
    "mul_and_silu",
    "quick_gelu",
    "relu2",
    "silu_and_mul",
    "silu_mul",
    "swigluoai_and_mul",
]


@triton.jit
def _times_sigmoid(x, argument):
    return tl.div_rn(x, 1.0 + tl.exp(-argument))


@triton.jit
def _activated(x, by, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return _times_sigmoid(x, x)
    if ACTIVATION == "gelu_none":
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == "quick_gelu":
        return _times_sigmoid(x, 1.702 * x)
    if ACTIVATION == "relu2":
        x = tl.where(x <= 0.0, 0.0, x)
        return x * x
    if ACTIVATION == "fatrelu":
        return tl.where(x <= rounded(tl.cast(by, tl.float32), dtype), 0.0, x)
    # gelu_tanh: 0.5 (1 + tanh u) is sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
    return _times_sigmoid(x, x * (1.5957691216057308 + 0.07135481627159666 * (x * x)))


@triton.jit
def _value(
    gate, up, at, mask, by, limit, ACTIVATION: tl.constexpr, GATES: tl.constexpr, STEP: tl.constexpr
):
    """The result, rounded to the dtype of ``gate`` as an fp32 value."""
    dtype: tl.constexpr = gate.dtype.element_ty
    opened = tl.load(gate + at * STEP, mask, 0.0).to(tl.float32)
    if ACTIVATION == "swigluoai":
        value = tl.load(up + at * STEP, mask, 0.0).to(tl.float32)
        most = tl.cast(limit, tl.float32)
        opened = tl.where(opened > most, most, opened)
        value = tl.where(value > most, most, tl.where(value < -most, -most, value))
        sigmoid = _times_sigmoid(
            tl.full(opened.shape, 1.0, tl.float32), opened * tl.cast(by, tl.float32)
        )
        return rounded((value + 1.0) * (opened * sigmoid), dtype)
    opened = rounded(_activated(opened, by, dtype, ACTIVATION), dtype)
    if not GATES:
        return opened
    return rounded(opened * tl.load(up + at, mask, 0.0).to(tl.float32), dtype)


@triton.jit
def _blocks(
    gate,
    up,
    out,
    gate_stride,
    up_stride,
    by,
    limit,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATES: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    gate += row * gate_stride
    up += row * up_stride
    value = _value(gate, up, at, mask, by, limit, ACTIVATION, GATES, STEP)
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask)


@triton.jit
def _rows(
    gate,
    up,
    out,
    scales,
    zero_points,
    scale,
    zero_point,
    gate_stride,
    up_stride,
    by,
    limit,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STEP: tl.constexpr,
    SINK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gate += row * gate_stride
    up += row * up_stride
    offsets = tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    value = _value(gate, up, offsets, mask, by, limit, ACTIVATION, True, STEP)
    store_row(
        tl.where(mask, value, 0.0), row, offsets, mask, out + row * WIDTH, scales, zero_points,
        scale, zero_point, WIDTH, BLOCK, SINK, GROUP,
    )  # fmt: skip


_BLOCKS = tuned(_blocks, ["WIDTH", "ACTIVATION"])
_ROWS = tuned(_rows, ["WIDTH", "ACTIVATION", "SINK", "GROUP"])
_BLOCK = 1024  # of a kernel that needs nothing of the rest of the row


Others = tuple[Tensor, ...]  # results beside the first, of which gates have none


class _Numbers(NamedTuple):
    by: float = 0.0
    limit: float = 0.0


def _write(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    out: Tensor,
    numbers: _Numbers = _Numbers(),  # noqa: B008 (it never changes)
    step: int = 1,
) -> Tensor:
    width = out.shape[-1]
    gates = spaced(gate)
    ups = gates if up is None else spaced(up)
    block = min(block_of(width), _BLOCK)
    grid: Any = (out.numel() // width, triton.cdiv(width, block))
    wrap_triton(_BLOCKS[_BLOCK])[grid](
        gates.tensor,
        ups.tensor,
        out,
        gates.stride,
        ups.stride,
        numbers.by,
        numbers.limit,
        WIDTH=width,
        BLOCK=block,
        ACTIVATION=activation,
        GATES=up is not None,
        STEP=step,
    )
    return out


def _write_to(
    sink: Sink,
    gate: Tensor,
    up: Tensor,
    activation: str,
    numbers: _Numbers = _Numbers(),  # noqa: B008 (it never changes)
    step: int = 1,
) -> Others:
    """Into a sink, which may need the rest of the row."""
    if sink.kind == "as it is":
        _write(gate, up, activation, sink.out, numbers, step)
        return ()
    width = sink.out.shape[-1]
    gates, ups = spaced(gate), spaced(up)
    block = block_of(width)
    by_rows(_ROWS, block, sink.out.numel() // width)(
        gates.tensor,
        ups.tensor,
        *sink.pointers,
        gates.stride,
        ups.stride,
        numbers.by,
        numbers.limit,
        WIDTH=width,
        BLOCK=block,
        ACTIVATION=activation,
        STEP=step,
        **sink.constants,
    )
    return ()


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


@triton_op("compilepass_triton::silu_mul", mutates_args=())
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _write(gate, up, "silu", outputs("silu_mul", gate, up))


@triton_op("compilepass_triton::gelu_mul", mutates_args=())
def gelu_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return _write(gate, up, f"gelu_{approximate}", outputs("gelu_mul", gate, up, approximate))


@triton_op("compilepass_triton::silu_and_mul", mutates_args=())
def silu_and_mul(x: Tensor) -> Tensor:
    return _write(*_halves(x), "silu", outputs("silu_and_mul", x))


@triton_op("compilepass_triton::gelu_and_mul", mutates_args=())
def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    return _write(*_halves(x), f"gelu_{approximate}", outputs("gelu_and_mul", x, approximate))


@triton_op("compilepass_triton::mul_and_silu", mutates_args=())
def mul_and_silu(x: Tensor) -> Tensor:
    up, gate = _halves(x)
    return _write(gate, up, "silu", outputs("mul_and_silu", x))


@triton_op("compilepass_triton::fatrelu_and_mul", mutates_args=())
def fatrelu_and_mul(x: Tensor, threshold: float) -> Tensor:
    out = outputs("fatrelu_and_mul", x, threshold)
    return _write(*_halves(x), "fatrelu", out, _Numbers(threshold))


@triton_op("compilepass_triton::swigluoai_and_mul", mutates_args=())
def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    out = outputs("swigluoai_and_mul", x, alpha, limit)
    rows = spaced(x).tensor
    return _write(rows, rows[..., 1:], "swigluoai", out, _Numbers(alpha, limit), step=2)


@triton_op("compilepass_triton::gelu_new", mutates_args=())
def gelu_new(x: Tensor) -> Tensor:
    return _write(x, None, "gelu_tanh", outputs("gelu_new", x))


@triton_op("compilepass_triton::gelu_fast", mutates_args=())
def gelu_fast(x: Tensor) -> Tensor:
    return _write(x, None, "gelu_tanh", outputs("gelu_fast", x))


@triton_op("compilepass_triton::quick_gelu", mutates_args=())
def quick_gelu(x: Tensor) -> Tensor:
    return _write(x, None, "quick_gelu", outputs("quick_gelu", x))


@triton_op("compilepass_triton::relu2", mutates_args=())
def relu2(x: Tensor) -> Tensor:
    return _write(x, None, "relu2", outputs("relu2", x))


def _write_silu_mul(sink: Sink, _: Others, gate: Tensor, up: Tensor) -> Others:
    return _write_to(sink, gate, up, "silu")


def _write_gelu_mul(sink: Sink, _: Others, gate: Tensor, up: Tensor, approximate: str) -> Others:
    return _write_to(sink, gate, up, f"gelu_{approximate}")


def _write_silu_and_mul(sink: Sink, _: Others, x: Tensor) -> Others:
    return _write_to(sink, *_halves(x), "silu")


def _write_mul_and_silu(sink: Sink, _: Others, x: Tensor) -> Others:
    up, gate = _halves(x)
    return _write_to(sink, gate, up, "silu")


def _write_gelu_and_mul(sink: Sink, _: Others, x: Tensor, approximate: str) -> Others:
    return _write_to(sink, *_halves(x), f"gelu_{approximate}")


def _write_fatrelu_and_mul(sink: Sink, _: Others, x: Tensor, threshold: float) -> Others:
    return _write_to(sink, *_halves(x), "fatrelu", _Numbers(threshold))


def _write_swigluoai_and_mul(
    sink: Sink, _: Others, x: Tensor, alpha: float = 1.702, limit: float = 7.0
) -> Others:
    rows = spaced(x).tensor
    return _write_to(sink, rows, rows[..., 1:], "swigluoai", _Numbers(alpha, limit), step=2)


QUANTISED = {
    **quantised_ops("silu_mul", _write_silu_mul),
    **quantised_ops("gelu_mul", _write_gelu_mul),
    **quantised_ops("silu_and_mul", _write_silu_and_mul),
    **quantised_ops("mul_and_silu", _write_mul_and_silu),
    **quantised_ops("gelu_and_mul", _write_gelu_and_mul),
    **quantised_ops("fatrelu_and_mul", _write_fatrelu_and_mul),
    **quantised_ops("swigluoai_and_mul", _write_swigluoai_and_mul),
}
