"""Activations on Triton: of gates in a tensor of their own or in a half of one, and of no gate.

An activation has up to two numbers, ``by`` and ``limit``; what they mean is its own affair.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .rows import (
    block_of,
    by_rows,
    largest_bits,
    outputs,
    quantised,
    rounded,
    scale_of,
    spaced,
    tuned,
)

__all__ = [
    "fatrelu_and_mul",
    "gelu_and_mul",
    "gelu_and_mul_dynamic_int8_quant",
    "gelu_fast",
    "gelu_mul",
    "gelu_mul_dynamic_int8_quant",
    "gelu_new",
    "mul_and_silu",
    "quick_gelu",
    "relu2",
    "silu_and_mul",
    "silu_and_mul_dynamic_int8_quant",
    "silu_mul",
    "silu_mul_dynamic_int8_quant",
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
def _quantised_rows(
    gate,
    up,
    out,
    scales,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gate += row * gate_stride
    up += row * up_stride
    out += row * WIDTH
    offsets = tl.arange(0, BLOCK)
    if WIDTH <= BLOCK:
        mask = offsets < WIDTH
        value = _value(gate, up, offsets, mask, 0.0, 0.0, ACTIVATION, True, 1)
        step = scale_of(tl.max(largest_bits(value), 0))
        tl.store(scales + row, step)
        tl.store(out + offsets, quantised(value, step), mask)
    else:
        largest = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = _value(gate, up, at, at < WIDTH, 0.0, 0.0, ACTIVATION, True, 1)
            largest = tl.maximum(largest, largest_bits(value))
        step = scale_of(tl.max(largest, 0))
        tl.store(scales + row, step)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = _value(gate, up, at, at < WIDTH, 0.0, 0.0, ACTIVATION, True, 1)
            tl.store(out + at, quantised(value, step), at < WIDTH)


_BLOCKS = tuned(_blocks, ["WIDTH", "ACTIVATION"])
_QUANTISED = tuned(_quantised_rows, ["WIDTH", "ACTIVATION"])
_BLOCK = 1024  # of a kernel that needs nothing of the rest of the row


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


def _quantise(
    gate: Tensor, up: Tensor, activation: str, out: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    width = gate.shape[-1]
    gates, ups = spaced(gate), spaced(up)
    block = block_of(width)
    by_rows(_QUANTISED, block, gate.numel() // width)(
        gates.tensor,
        ups.tensor,
        *out,
        gates.stride,
        ups.stride,
        WIDTH=width,
        BLOCK=block,
        ACTIVATION=activation,
    )
    return out


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


@triton_op("compilepass_triton::silu_mul_dynamic_int8_quant", mutates_args=())
def silu_mul_dynamic_int8_quant(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _quantise(gate, up, "silu", outputs("silu_mul_dynamic_int8_quant", gate, up))


@triton_op("compilepass_triton::silu_and_mul_dynamic_int8_quant", mutates_args=())
def silu_and_mul_dynamic_int8_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    return _quantise(*_halves(x), "silu", outputs("silu_and_mul_dynamic_int8_quant", x))


@triton_op("compilepass_triton::gelu_mul_dynamic_int8_quant", mutates_args=())
def gelu_mul_dynamic_int8_quant(
    gate: Tensor, up: Tensor, approximate: str
) -> tuple[Tensor, Tensor]:
    out = outputs("gelu_mul_dynamic_int8_quant", gate, up, approximate)
    return _quantise(gate, up, f"gelu_{approximate}", out)


@triton_op("compilepass_triton::gelu_and_mul_dynamic_int8_quant", mutates_args=())
def gelu_and_mul_dynamic_int8_quant(x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    out = outputs("gelu_and_mul_dynamic_int8_quant", x, approximate)
    return _quantise(*_halves(x), f"gelu_{approximate}", out)
