"""What Triton kernels on rows share: device functions, block sizes, and how rows lie in memory.

A row is a program's. Up to :data:`WIDEST_BLOCK` elements it is held in registers, read once and
written once; a wider one is read again, block by block, for each pass over it. Widths are those of
a model, so each is compiled for, and masks vanish where it is a power of two.

Only what loads kernels imports this module: it needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from ..registry import find

__all__ = [
    "Spaced",
    "block_of",
    "by_rows",
    "largest_bits",
    "one_if_interpreted",
    "outputs",
    "rounded",
    "spaced",
    "tuned",
    "weighted",
]

WIDEST_BLOCK = 16384
WARPS = {1024: (1, 2, 4), 4096: (4, 8), WIDEST_BLOCK: (8, 16)}  # by the largest block

Kernel = Any  # an autotuned kernel; Triton is not typed


class Spaced(NamedTuple):
    """A tensor whose rows lie at one distance of each other, their elements side by side."""

    tensor: Tensor
    stride: int


def spaced(t: Tensor) -> Spaced:
    """``t`` itself where its rows are spaced evenly, else a contiguous copy."""
    even = t.stride(-1) == 1 or t.shape[-1] == 1
    for d in range(1, t.dim() - 1):
        even = even and t.stride(d - 1) == t.stride(d) * t.shape[d]
    if not even:
        t = t.contiguous()
    return Spaced(t, t.stride(-2) if t.dim() > 1 else t.shape[-1])


def block_of(width: int) -> int:
    """How many elements of a row of ``width`` a program holds at a time."""
    return min(int(triton.next_power_of_2(width)), WIDEST_BLOCK)


def tuned(kernel: Any, key: Iterable[str]) -> dict[int, Kernel]:
    """The kernel for each class of blocks, with the numbers of warps that are worth trying there.

    Triton tries them on the first call of each ``key`` and keeps what it found on disk.
    """
    return {
        block: triton.autotune(
            configs=one_if_interpreted([triton.Config({}, num_warps=n) for n in warps]),
            key=list(key),
            cache_results=True,
        )(kernel)
        for block, warps in WARPS.items()
    }


def by_rows(kernels: dict[int, Kernel], block: int, rows: Any) -> Callable[..., Any]:
    """The launcher of one program a row, for blocks of this size."""
    kernel = next(kernel for largest, kernel in kernels.items() if block <= largest)
    launcher: Callable[..., Any] = wrap_triton(kernel)[(rows,)]
    return launcher


def outputs(op: str, *args: Any) -> Any:
    """New outputs for a call of ``compilepass::op``, once its fake finds that the shapes fit."""
    known = find(f"compilepass::{op}")
    assert known is not None and known.fake is not None
    return known.fake(*args)


def one_if_interpreted(configs: list[Any]) -> list[Any]:
    """The interpreter has no warps, and nothing to time: one configuration needs no trial."""
    return configs[:1] if triton.knobs.runtime.interpret else configs


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """What is left of an fp32 value when it has been stored as ``dtype``."""
    return value.to(dtype).to(tl.float32)


@triton.jit
def weighted(normed, weight, dtype: tl.constexpr, VARIANT: tl.constexpr):
    """A normed value times its weight, by the variant of RMSNorm, as ``dtype`` holds it."""
    if VARIANT == "llama":
        normed = rounded(normed, dtype)
    elif VARIANT == "gemma":
        weight += 1.0
    return rounded(normed * weight, dtype)


@triton.jit
def largest_bits(value):
    """The bits of ``abs(value)``: ordered as the values are, a NaN above all, as ``amax`` has it.

    Triton's own maximum ignores a NaN.
    """
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
