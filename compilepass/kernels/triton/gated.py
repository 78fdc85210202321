"""Gated activations on Triton, of two tensors or of one's halves, with and without int8."""

from __future__ import annotations

from typing import Any

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
    "gelu_and_mul",
    "gelu_mul",
    "silu_and_mul",
    "silu_and_mul_dynamic_int8_quant",
    "silu_mul",
    "silu_mul_dynamic_int8_quant",
]


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return tl.div_rn(x, 1.0 + tl.exp(-x))
    if ACTIVATION == "gelu_none":
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    # 0.5 (1 + tanh u) is sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
    return tl.div_rn(x, 1.0 + tl.exp(-x * (1.5957691216057308 + 0.07135481627159666 * (x * x))))


@triton.jit
def _product(gate, up, at, mask, ACTIVATION: tl.constexpr):
    """The result, rounded to the dtype of ``gate`` as an fp32 value."""
    dtype: tl.constexpr = gate.dtype.element_ty
    opened = _activated(tl.load(gate + at, mask, 0.0).to(tl.float32), ACTIVATION)
    value = tl.load(up + at, mask, 0.0).to(tl.float32)
    return rounded(rounded(opened, dtype) * value, dtype)


@triton.jit
def _gated_blocks(
    gate,
    up,
    out,
    gate_stride,
    up_stride,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    value = _product(gate + row * gate_stride, up + row * up_stride, at, mask, ACTIVATION)
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
        value = _product(gate, up, offsets, mask, ACTIVATION)
        step = scale_of(tl.max(largest_bits(value), 0))
        tl.store(scales + row, step)
        tl.store(out + offsets, quantised(value, step), mask)
    else:
        largest = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = _product(gate, up, at, at < WIDTH, ACTIVATION)
            largest = tl.maximum(largest, largest_bits(value))
        step = scale_of(tl.max(largest, 0))
        tl.store(scales + row, step)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = _product(gate, up, at, at < WIDTH, ACTIVATION)
            tl.store(out + at, quantised(value, step), at < WIDTH)


_GATED = tuned(_gated_blocks, ["WIDTH", "ACTIVATION"])
_QUANTISED = tuned(_quantised_rows, ["WIDTH", "ACTIVATION"])
_BLOCK = 1024  # of a kernel that needs nothing of the rest of the row


def _write(gate: Tensor, up: Tensor, activation: str, out: Tensor) -> Tensor:
    width = gate.shape[-1]
    gates, ups = spaced(gate), spaced(up)
    block = min(block_of(width), _BLOCK)
    grid: Any = (gate.numel() // width, triton.cdiv(width, block))
    wrap_triton(_GATED[_BLOCK])[grid](
        gates.tensor,
        ups.tensor,
        out,
        gates.stride,
        ups.stride,
        WIDTH=width,
        ACTIVATION=activation,
        BLOCK=block,
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


@triton_op("compilepass_triton::silu_mul_dynamic_int8_quant", mutates_args=())
def silu_mul_dynamic_int8_quant(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _quantise(gate, up, "silu", outputs("silu_mul_dynamic_int8_quant", gate, up))


@triton_op("compilepass_triton::silu_and_mul_dynamic_int8_quant", mutates_args=())
def silu_and_mul_dynamic_int8_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    return _quantise(*_halves(x), "silu", outputs("silu_and_mul_dynamic_int8_quant", x))
