"""RMSNorm and layer norm on Triton, after a residual add or not, into any sink."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from .rows import block_of, by_rows, outputs, rounded, spaced, tuned, weighted
from .sinks import Sink, quantised_ops, store_row

__all__ = [
    "QUANTISED",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "rms_norm",
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
    total,
    out,
    scales,
    zero_points,
    scale,
    zero_point,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VARIANT: tl.constexpr,
    ADDS: tl.constexpr,
    SINK: tl.constexpr,
    GROUP: tl.constexpr,
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
        factor = tl.rsqrt(tl.div_rn(tl.sum(value * value, 0), WIDTH * 1.0) + epsilon)
        normed = _normed(value, factor, weight, offsets, mask, VARIANT)
        store_row(
            normed, row, offsets, mask, out, scales, zero_points, scale, zero_point,
            WIDTH, BLOCK, SINK, GROUP,
        )  # fmt: skip
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = _summed(x, residual, at, at < WIDTH, ADDS)
            if ADDS:
                tl.store(total + at, value.to(total.dtype.element_ty), at < WIDTH)
            squares += value * value
        factor = tl.rsqrt(tl.div_rn(tl.sum(squares, 0), WIDTH * 1.0) + epsilon)
        # Sums are taken again: what other threads have stored is not theirs to read yet.
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = _summed(x, residual, at, at < WIDTH, ADDS)
            normed = _normed(value, factor, weight, at, at < WIDTH, VARIANT)
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
    total,
    out,
    scales,
    zero_points,
    scale,
    zero_point,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    SINK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    residual += row * residual_stride
    total += row * WIDTH
    out += row * WIDTH
    dtype: tl.constexpr = x.dtype.element_ty
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
        store_row(
            rounded(value, dtype), row, offsets, mask, out, scales, zero_points, scale, zero_point,
            WIDTH, BLOCK, SINK, GROUP,
        )  # fmt: skip
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
        factor = tl.rsqrt(tl.where(variance < 0.0, 0.0, variance) + epsilon)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = _summed(x, residual, at, at < WIDTH, ADDS)
            normed = ((value - near) - rest) * factor
            value = _scaled(normed, weight, bias, at, at < WIDTH, WEIGHTED, BIASED)
            tl.store(out + at, value.to(dtype), at < WIDTH)


_NORM_ROWS = tuned(_norm_rows, ["WIDTH", "VARIANT", "ADDS", "SINK", "GROUP"])
_LAYER_NORM_ROWS = tuned(_layer_norm_rows, ["WIDTH", "ADDS", "WEIGHTED", "BIASED", "SINK", "GROUP"])


def _write_norm(
    sink: Sink,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    variant: str,
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
        sink.out if total is None else total,
        *sink.pointers,
        rows.stride,
        others.stride,
        eps,
        WIDTH=width,
        BLOCK=block,
        VARIANT=variant,
        ADDS=residual is not None,
        **sink.constants,
    )


def _write_rms_norm(
    sink: Sink, _: tuple[Tensor, ...], x: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, ...]:
    _write_norm(sink, None, x, None, weight, eps, variant)
    return ()


def _write_add_rms_norm(
    sink: Sink,
    others: tuple[Tensor, ...],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    variant: str = "llama",
) -> tuple[Tensor, ...]:
    _write_norm(sink, others[0], x, residual, weight, eps, variant)
    return others


@triton_op("compilepass_triton::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float, variant: str = "llama") -> Tensor:
    out: Tensor = outputs("rms_norm", x, weight, eps, variant)
    _write_rms_norm(Sink(out), (), x, weight, eps, variant)
    return out


@triton_op("compilepass_triton::fused_add_rms_norm", mutates_args=())
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    out, total = outputs("fused_add_rms_norm", x, residual, weight, eps, variant)
    _write_add_rms_norm(Sink(out), (total,), x, residual, weight, eps, variant)
    return out, total


def _write_centred(
    sink: Sink,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    width = x.shape[-1]
    rows = spaced(x)
    others = rows if residual is None else spaced(residual)
    block = block_of(width)
    by_rows(_LAYER_NORM_ROWS, block, x.numel() // width)(
        rows.tensor,
        others.tensor,
        rows.tensor if weight is None else weight.contiguous(),
        rows.tensor if bias is None else bias.contiguous(),
        sink.out if total is None else total,
        *sink.pointers,
        rows.stride,
        others.stride,
        eps,
        WIDTH=width,
        BLOCK=block,
        ADDS=residual is not None,
        WEIGHTED=weight is not None,
        BIASED=bias is not None,
        **sink.constants,
    )


def _write_layer_norm(
    sink: Sink,
    _: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    _write_centred(sink, None, x, None, weight, bias, eps)
    return ()


def _write_add_layer_norm(
    sink: Sink, others: tuple[Tensor, ...], x: Tensor, residual: Tensor, *affine: Any
) -> tuple[Tensor, ...]:
    _write_centred(sink, others[0], x, residual, *affine)
    return others


@triton_op("compilepass_triton::layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    out: Tensor = outputs("layer_norm", x, weight, bias, eps)
    _write_layer_norm(Sink(out), (), x, weight, bias, eps)
    return out


@triton_op("compilepass_triton::fused_add_layer_norm", mutates_args=())
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    out, total = outputs("fused_add_layer_norm", x, residual, weight, bias, eps)
    _write_add_layer_norm(Sink(out), (total,), x, residual, weight, bias, eps)
    return out, total


QUANTISED = {
    **quantised_ops("rms_norm", _write_rms_norm),
    **quantised_ops("fused_add_rms_norm", _write_add_rms_norm),
    **quantised_ops("layer_norm", _write_layer_norm),
    **quantised_ops("fused_add_layer_norm", _write_add_layer_norm),
}
