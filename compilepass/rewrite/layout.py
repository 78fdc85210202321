"""Everything about a tensor but its elements, compared without adding a guard."""

from __future__ import annotations

from typing import Any

import torch

from .term import Shape, product, same, size_of

__all__ = ["is_row_major", "layout"]


def layout(val: Any) -> Any:
    """Everything about a value but its elements, for comparison; ``None`` for ``None``."""
    if val is None:
        return None
    return _numbers(val.shape), _numbers(val.stride()), val.dtype, val.device


def _numbers(sizes: Any) -> Shape:
    """Sizes as ints and expressions, which can be compared without a guard."""
    return tuple([s if type(s) is int else size_of(s) for s in sizes])


def is_row_major(tensor: torch.Tensor) -> bool:
    """Whether the strides are known to be those of a contiguous tensor; adds no guard."""
    shape, strides, *_ = layout(tensor)
    return all(
        size == 1 or same(stride, product(shape[d + 1 :]))
        for d, (size, stride) in enumerate(zip(shape, strides, strict=True))
    )
