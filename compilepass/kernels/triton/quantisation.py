"""Dynamic int8 quantisation on Triton."""

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
    scale_of,
    spaced,
    tuned,
)

__all__ = ["quant_int8"]


@triton.jit
def _quantise_rows(x, out, scales, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * WIDTH
    offsets = tl.arange(0, BLOCK)
    if WIDTH <= BLOCK:
        mask = offsets < WIDTH
        value = tl.load(x + offsets, mask, 0.0).to(tl.float32)
        step = scale_of(tl.max(largest_bits(value), 0))
        tl.store(scales + row, step)
        tl.store(out + offsets, quantised(value, step), mask)
    else:
        largest = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = tl.load(x + at, at < WIDTH, 0.0).to(tl.float32)
            largest = tl.maximum(largest, largest_bits(value))
        step = scale_of(tl.max(largest, 0))
        tl.store(scales + row, step)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = tl.load(x + at, at < WIDTH, 0.0).to(tl.float32)
            tl.store(out + at, quantised(value, step), at < WIDTH)


_QUANTISE_ROWS = tuned(_quantise_rows, ["WIDTH"])


@triton_op("compilepass_triton::quant_int8", mutates_args=())
def quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    q, scale = outputs("quant_int8", x)
    rows = spaced(x)
    block = block_of(width)
    by_rows(_QUANTISE_ROWS, block, x.numel() // width)(
        rows.tensor, q, scale, rows.stride, WIDTH=width, BLOCK=block
    )
    return q, scale
