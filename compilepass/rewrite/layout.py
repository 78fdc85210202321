"""Everything about a tensor but its elements, compared without adding a guard."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from .term import Shape, product, same, size_of

__all__ = ["dense_strides", "dims_by_stride", "falls_along", "is_row_major", "is_strict", "layout"]


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


def is_strict(tensor: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Whether no two dimensions, in the order in which they lie in memory, have one stride."""
    strides = layout(tensor)[1]
    return not any(same(strides[a], strides[b]) for a, b in pairwise(order))


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


@functools.lru_cache(4096)
def _no_smaller(stride: Any, following: Any) -> bool:
    """Whether it holds for all sizes from 2 on: others do not matter for the order."""
    if isinstance(stride, int) and isinstance(following, int):
        return stride >= following > 0
    if following == 0 or stride == 0:
        return False
    ratio = stride / following
    if ratio == 1 or (ratio.is_integer and ratio.is_positive):
        return True
    difference = sympy.sympify(stride - following)
    for half in difference.atoms(FloorDiv):  # s - s // 2 is no smaller than s - s / 2
        factor, (whole, by) = difference.coeff(half), half.args
        if not (factor.is_number and by.is_number):
            return False
        difference = difference.xreplace({half: (whole if factor < 0 else whole - by + 1) / by})
    larger = {s: 2 + sympy.Dummy(integer=True, nonnegative=True) for s in difference.free_symbols}
    return bool(sympy.expand(difference.xreplace(larger)).is_nonnegative)
