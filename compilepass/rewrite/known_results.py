"""The results of simple operations, as fake tensors, worked out without running them.

A pattern is traced on tensors whose sizes are symbols, where PyTorch takes a hundred times as long
for each operation. What is not simple is left to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._sympy.functions import FloorDiv

from ..torch_compat import fake_like, fake_view
from .layout import dense_strides, dims_by_stride, falls_along, is_strict, layout
from .term import Shape, same, size_of

__all__ = ["known_result"]

aten = torch.ops.aten

_END = (1 << 63) - 1  # the end of a slice that goes to the end

#: those whose result has the dtype of their floating operands
_ELEMENTWISE = frozenset(
    getattr(aten, name)
    for name in (
        *("abs", "add", "clamp_max", "clamp_min", "cos", "div", "erf", "exp", "maximum"),
        *("minimum", "mul", "neg", "pow", "reciprocal", "relu", "round", "rsqrt", "sigmoid"),
        *("sin", "sqrt", "sub", "tanh"),
    )
)
_REDUCTIONS = frozenset([aten.amax.default, aten.amin.default, aten.mean.dim, aten.sum.dim_IntList])


def known_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` returns, or ``None``."""
    if func is aten.var_mean.correction and kwargs.keys() <= {"correction", "keepdim"}:
        out = _reduced(func, (*args, kwargs.get("keepdim", False)))
        return None if out is None else (out, fake_like(out, out.fake_mode))
    if func is aten.sum.dim_IntList and kwargs.keys() <= {"dtype"}:
        return _reduced(func, args, kwargs.get("dtype"))
    if kwargs:
        return None
    if func is torch.ops.prims.convert_element_type.default or func.overloadpacket in _ELEMENTWISE:
        return _elementwise(func, args)
    if func in _REDUCTIONS:
        return _reduced(func, args)
    work_out = _OTHERS.get(func)
    return work_out(*args) if work_out is not None else None


def _elementwise(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of an elementwise operation on tensors of one floating dtype, or of a cast.

    It has the shape of the one that the others are broadcast to, and lies in memory in the order of
    its dimensions there, where that of no other tensor disagrees or it comes before them.
    """
    tensors = [a for a in args if isinstance(a, FakeTensor)]
    if not tensors or any(isinstance(a, complex) for a in args):
        return None
    is_cast = func is torch.ops.prims.convert_element_type.default
    shapes = [layout(t)[0] for t in tensors]
    for full, shape in zip(tensors, shapes, strict=True):
        if all(_spreads(s, shape) for s in shapes):
            kinds = {(t.dtype, t.device) for t in tensors}
            if len(kinds) > 1 or not (is_cast or full.dtype.is_floating_point):
                return None
            order = dims_by_stride(full)
            if order is None:
                return None
            decides = full is tensors[0] and is_strict(full, order)
            if not decides and not all(falls_along(t, order) for t in tensors):
                return None
            strides = dense_strides(full.shape, order)
            return fake_like(
                full, full.fake_mode, dtype=args[1] if is_cast else None, strides=strides
            )
    return None


def _reduced(func: Any, args: tuple[Any, ...], dtype: torch.dtype | None = None) -> Any:
    """The result of a reduction of one dimension that is kept as 1; it is row-major."""
    x, dims, keep = (*args, False)[:3]
    if not isinstance(x, FakeTensor) or keep is not True:
        return None
    if not isinstance(dims, (list, tuple)) or len(dims) != 1 or x.dim() < 1:
        return None
    if not x.dtype.is_floating_point:
        if func is not aten.sum.dim_IntList:
            return None
        dtype = dtype or torch.int64
    dim = dims[0] % x.dim()
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    return fake_like(x, x.fake_mode, dtype=dtype, shape=shape)


def _multiplied(a: Any, b: Any) -> Any:
    """The product of two matrices, which is row-major."""
    both = isinstance(a, FakeTensor) and isinstance(b, FakeTensor)
    if not both or a.dtype != b.dtype or not a.dtype.is_floating_point or a.device != b.device:
        return None
    (rows, inner), (other, columns) = a.shape, b.shape
    if not same(size_of(inner), size_of(other)):
        return None
    return fake_like(a, a.fake_mode, shape=(rows, columns))


def _permuted(x: Any, dims: Any) -> Any:
    """A view with the dimensions in another order."""
    sizes, strides = x.shape, x.stride()
    return fake_view(x, [sizes[d] for d in dims], [strides[d] for d in dims])


def _unsqueezed(x: Any, dim: int) -> Any:
    """A view with one more dimension, of size 1."""
    sizes, strides = list(x.shape), list(x.stride())
    dim %= x.dim() + 1
    stride = sizes[dim] * strides[dim] if dim < x.dim() else 1
    sizes.insert(dim, 1)
    strides.insert(dim, stride)
    return fake_view(x, sizes, strides)


def _sliced(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """The first part of a dimension that is divided, ``x[: n // 2]``, or all behind it."""
    if step != 1 or x.dim() < 1:
        return None
    sizes, strides = list(x.shape), list(x.stride())
    dim %= x.dim()
    size = sizes[dim]
    from_start = start is None or (type(start) is int and start == 0)
    to_end = end is None or (type(end) is int and end >= _END)
    if from_start and _divides(end, size):
        sizes[dim] = end
        return fake_view(x, sizes, strides)
    if to_end and _divides(start, size):
        sizes[dim] = size - start
        return fake_view(x, sizes, strides, start * strides[dim])
    return None


def _divides(part: Any, size: Any) -> bool:
    """Whether ``part`` is known to be ``size // k``."""
    if part is None or isinstance(part, int) or isinstance(size, int):
        return False
    expr = size_of(part)
    is_quotient = isinstance(expr, FloorDiv) and isinstance(expr.args[1], sympy.Integer)
    return bool(is_quotient and expr.args[0] == size_of(size) and expr.args[1] >= 1)


def _joined(tensors: Any, dim: int = 0) -> Any:
    """The result of a concatenation along the last dimension, which is row-major."""
    if not tensors or not all(isinstance(t, FakeTensor) for t in tensors):
        return None
    order = dims_by_stride(tensors[0])
    first = tensors[0]
    if order is None or first.dim() < 1 or order[-1] != first.dim() - 1:
        return None  # it may be kept with its channels last
    kinds = {(t.dtype, t.device, layout(t)[0][:-1]) for t in tensors}
    if len(kinds) > 1 or dim not in (-1, first.dim() - 1):
        return None
    if not all(falls_along(t, order) for t in tensors):
        return None
    shape = (*first.shape[:-1], sum(t.shape[-1] for t in tensors))
    return fake_like(first, first.fake_mode, shape=shape)


def _spreads(shape: Shape, over: Shape) -> bool:
    """Whether a tensor of ``shape`` is broadcast to ``over``, as far as it is known."""
    if len(shape) > len(over):
        return False
    ends = zip(reversed(shape), reversed(over), strict=False)
    return all((type(s) is int and s == 1) or same(s, o) for s, o in ends)


_OTHERS: dict[Any, Callable[..., Any]] = {
    aten.cat.default: _joined,
    aten.mm.default: _multiplied,
    aten.permute.default: _permuted,
    aten.slice.Tensor: _sliced,
    aten.unsqueeze.default: _unsqueezed,
}
