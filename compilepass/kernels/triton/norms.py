"""RMSNorm and layer norm on Triton, alone and after a residual add; RMSNorm with int8 as well."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

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
    weighted,
)

__all__ = [
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_int8_quant",
    "layer_norm",
    "rms_norm",
    "rms_norm_dynamic_int8_quant",
]


@triton.jit
def _summed(x, residual, at, mask, ADDS: tl.constexpr):
    value = tl.load(x + at, mask, 0.0).to(tl.float32)
    if ADDS:
        other = tl.load(residual + at, mask, 0.0).to(tl.float32)
        value = rounded(value + other, x.dtype.element_ty)
    return value


@triton.jit
def _normed(value, scale, weight, at, mask, VARIANT: tl.constexpr):
    factor = tl.load(weight + at, mask, 0.0).to(tl.float32)
    return weighted(value * scale, factor, weight.dtype.element_ty, VARIANT)


@triton.jit
def _norm_rows(
    x,
    residual,
    weight,
    out,
    scales,
    total,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VARIANT: tl.constexpr,
    ADDS: tl.constexpr,
    QUANTISES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    residual += row * residual_stride
    total += row * WIDTH
    out += row * WIDTH
    offsets = tl.arange(0, BLOCK)
    # Inductor passes a float as float64, which would take all that follows with it
    epsilon = tl.cast(eps, tl.float32)
    if WIDTH <= BLOCK:
        mask = offsets < WIDTH
        value = _summed(x, residual, offsets, mask, ADDS)
        if ADDS:
            tl.store(total + offsets, value.to(total.dtype.element_ty), mask)
        scale = tl.rsqrt(tl.div_rn(tl.sum(value * value, 0), WIDTH * 1.0) + epsilon)
        normed = _normed(value, scale, weight, offsets, mask, VARIANT)
        if QUANTISES:
            step = scale_of(tl.max(largest_bits(normed), 0))
            tl.store(scales + row, step)
            tl.store(out + offsets, quantised(normed, step), mask)
        else:
            tl.store(out + offsets, normed.to(out.dtype.element_ty), mask)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = _summed(x, residual, at, at < WIDTH, ADDS)
            if ADDS:
                tl.store(total + at, value.to(total.dtype.element_ty), at < WIDTH)
            squares += value * value
        scale = tl.rsqrt(tl.div_rn(tl.sum(squares, 0), WIDTH * 1.0) + epsilon)
        # Sums are taken again: what other threads have stored is not theirs to read yet.
        if QUANTISES:
            largest = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, WIDTH, BLOCK):
                at = start + offsets
                value = _summed(x, residual, at, at < WIDTH, ADDS)
                normed = _normed(value, scale, weight, at, at < WIDTH, VARIANT)
                largest = tl.maximum(largest, largest_bits(normed))
            step = scale_of(tl.max(largest, 0))
            tl.store(scales + row, step)
            for start in range(0, WIDTH, BLOCK):
                at = start + offsets
                value = _summed(x, residual, at, at < WIDTH, ADDS)
                normed = _normed(value, scale, weight, at, at < WIDTH, VARIANT)
                tl.store(out + at, quantised(normed, step), at < WIDTH)
        else:
            for start in range(0, WIDTH, BLOCK):
                at = start + offsets
                value = _summed(x, residual, at, at < WIDTH, ADDS)
                normed = _normed(value, scale, weight, at, at < WIDTH, VARIANT)
                tl.store(out + at, normed.to(out.dtype.element_ty), at < WIDTH)


@triton.jit
def _scaled(value, weight, bias, at, mask, WEIGHTED: tl.constexpr, BIASED: tl.constexpr):
    if WEIGHTED:
        value *= tl.load(weight + at, mask, 0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + at, mask, 0.0).to(tl.float32)
    return value


@triton.jit
def _layer_norm_rows(
    x,
    residual,
    weight,
    bias,
    out,
    total,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    residual += row * residual_stride
    total += row * WIDTH
    out += row * WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    offsets = tl.arange(0, BLOCK)
    epsilon = tl.cast(eps, tl.float32)
    share: tl.constexpr = 1.0 / WIDTH  # of shares, since a sum of large values could overflow
    if WIDTH <= BLOCK:
        mask = offsets < WIDTH
        value = _summed(x, residual, offsets, mask, ADDS)
        if ADDS:
            tl.store(total + offsets, value.to(dtype), mask)
        near = tl.sum(value * share, 0)  # the mean but for rounding
        value = tl.where(mask, value - near, 0.0)
        value = tl.where(mask, value - tl.sum(value, 0) * share, 0.0)
        normed = value * tl.rsqrt(tl.sum(value * value, 0) * share + epsilon)
        value = _scaled(normed, weight, bias, offsets, mask, WEIGHTED, BIASED)
        tl.store(out + offsets, value.to(dtype), mask)
    else:
        shares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = _summed(x, residual, at, at < WIDTH, ADDS)
            if ADDS:
                tl.store(total + at, value.to(dtype), at < WIDTH)
            shares += value * share
        near = tl.sum(shares, 0)
        rests = tl.zeros((BLOCK,), tl.float32)
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = _summed(x, residual, at, at < WIDTH, ADDS)
            value = tl.where(at < WIDTH, value - near, 0.0)
            rests += value
            squares += value * value
        rest = tl.sum(rests, 0) * share
        variance = tl.sum(squares, 0) * share - rest * rest
        scale = tl.rsqrt(tl.where(variance < 0.0, 0.0, variance) + epsilon)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = _summed(x, residual, at, at < WIDTH, ADDS)
            normed = ((value - near) - rest) * scale
            value = _scaled(normed, weight, bias, at, at < WIDTH, WEIGHTED, BIASED)
            tl.store(out + at, value.to(dtype), at < WIDTH)


_NORM_ROWS = tuned(_norm_rows, ["WIDTH", "VARIANT", "ADDS", "QUANTISES"])
_LAYER_NORM_ROWS = tuned(_layer_norm_rows, ["WIDTH", "ADDS", "WEIGHTED", "BIASED"])


def _run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    variant: str,
    out: Tensor,
    scale: Tensor | None,
    total: Tensor | None,
) -> None:
    width = x.shape[-1]
    rows = spaced(x)
    others = rows if residual is None else spaced(residual)
    block = block_of(width)
    # What a kernel does not use must still be a pointer, so an argument that it has stands for it.
    by_rows(_NORM_ROWS, block, x.numel() // width)(
        rows.tensor,
        others.tensor,
        weight.contiguous(),
        out,
        out if scale is None else scale,
        out if total is None else total,
        rows.stride,
        others.stride,
        eps,
        WIDTH=width,
        BLOCK=block,
        VARIANT=variant,
        ADDS=residual is not None,
        QUANTISES=scale is not None,
    )


@triton_op("compilepass_triton::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float, variant: str = "llama") -> Tensor:
    out: Tensor = outputs("rms_norm", x, weight, eps, variant)
    _run(x, None, weight, eps, variant, out, None, None)
    return out


@triton_op("compilepass_triton::fused_add_rms_norm", mutates_args=())
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    out, total = outputs("fused_add_rms_norm", x, residual, weight, eps, variant)
    _run(x, residual, weight, eps, variant, out, None, total)
    return out, total


@triton_op("compilepass_triton::rms_norm_dynamic_int8_quant", mutates_args=())
def rms_norm_dynamic_int8_quant(
    x: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    q, scale = outputs("rms_norm_dynamic_int8_quant", x, weight, eps, variant)
    _run(x, None, weight, eps, variant, q, scale, None)
    return q, scale


@triton_op("compilepass_triton::fused_add_rms_norm_dynamic_int8_quant", mutates_args=())
def fused_add_rms_norm_dynamic_int8_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor, Tensor]:
    q, scale, total = outputs(
        "fused_add_rms_norm_dynamic_int8_quant", x, residual, weight, eps, variant
    )
    _run(x, residual, weight, eps, variant, q, scale, total)
    return q, scale, total


def _run_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    total: Tensor | None,
) -> None:
    width = x.shape[-1]
    rows = spaced(x)
    others = rows if residual is None else spaced(residual)
    block = block_of(width)
    by_rows(_LAYER_NORM_ROWS, block, x.numel() // width)(
        rows.tensor,
        others.tensor,
        out if weight is None else weight.contiguous(),
        out if bias is None else bias.contiguous(),
        out,
        out if total is None else total,
        rows.stride,
        others.stride,
        eps,
        WIDTH=width,
        BLOCK=block,
        ADDS=residual is not None,
        WEIGHTED=weight is not None,
        BIASED=bias is not None,
    )


@triton_op("compilepass_triton::layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    out: Tensor = outputs("layer_norm", x, weight, bias, eps)
    _run_layer_norm(x, None, weight, bias, eps, out, None)
    return out


@triton_op("compilepass_triton::fused_add_layer_norm", mutates_args=())
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    out, total = outputs("fused_add_layer_norm", x, residual, weight, bias, eps)
    _run_layer_norm(x, residual, weight, bias, eps, out, total)
    return out, total
