"""Everything about a tensor but its elements, compared without adding a guard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .term import Shape, product, same, size_of

__all__ = ["dense_strides", "dims_by_stride", "falls_along", "is_row_major", "layout"]


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


def dims_by_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions as they lie in memory, that with the largest stride first, if it is known."""
    strides = layout(tensor)[1]
    order: list[int] = []
    for dim, stride in enumerate(strides):
        place = len(order)
        while place and not _no_smaller(strides[order[place - 1]], stride):
            place -= 1
        order.insert(place, dim)
    return tuple(order) if _falls([strides[d] for d in order]) else None


def falls_along(tensor: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Whether the strides are known to fall in this order of dimensions; there may be gaps.

    A tensor with fewer dimensions has the last ones; those of size 1 may have any stride.
    """
    shape, strides, *_ = layout(tensor)
    missing = len(order) - len(shape)
    dims = [d - missing for d in order if d >= missing]
    return _falls([strides[d] for d in dims if shape[d] != 1])


def dense_strides(shape: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """The strides of a tensor without gaps whose dimensions lie in this order."""
    strides: list[Any] = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim]
    return strides


def _falls(strides: Sequence[Any]) -> bool:
    return all(map(_no_smaller, strides, strides[1:]))


def _no_smaller(stride: Any, following: Any) -> bool:
    if isinstance(stride, int) and isinstance(following, int):
        return stride >= following > 0
    if following == 0 or stride == 0:
        return False
    ratio = stride / following
    return bool(ratio == 1 or (ratio.is_integer and ratio.is_positive))
