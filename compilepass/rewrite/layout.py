"""Everything about a tensor but its elements, compared without adding a guard."""

from __future__ import annotations

from typing import Any

import torch

from .term import Shape, product, same, size_of

__all__ = ["in_order", "is_row_major", "layout"]


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


def in_order(tensor: torch.Tensor) -> bool:
    """Whether each dimension is known to have a stride no smaller than the next one's, which is
    what an elementwise result is row-major for; there may be gaps, as in a slice of each row.
    """
    strides = layout(tensor)[1]
    return all(map(_no_smaller, strides, strides[1:]))


def _no_smaller(stride: Any, following: Any) -> bool:
    if isinstance(stride, int) and isinstance(following, int):
        return stride >= following > 0
    if following == 0 or stride == 0:
        return False
    ratio = stride / following
    return bool(ratio == 1 or (ratio.is_integer and ratio.is_positive))
