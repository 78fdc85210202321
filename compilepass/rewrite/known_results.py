"""The results of simple operations, as fake tensors, worked out without running them.

A pattern is traced on tensors whose sizes are symbols, where PyTorch takes a hundred times as long
for each operation. What is not simple is left to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..torch_compat import fake_like
from .layout import dense_strides, dims_by_stride, falls_along, layout
from .term import Shape, same

__all__ = ["known_result"]

aten = torch.ops.aten

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
    if func is torch.ops.prims.convert_element_type.default or func.overloadpacket in _ELEMENTWISE:
        return _elementwise(func, args) if not kwargs else None
    if func in _REDUCTIONS:
        return _reduced(args) if not kwargs else None
    if func is aten.var_mean.correction and kwargs.keys() <= {"correction", "keepdim"}:
        out = _reduced((*args, kwargs.get("keepdim", False)))
        return None if out is None else (out, fake_like(out, out.fake_mode))
    return _joined(*args) if func is aten.cat.default and not kwargs else None


def _elementwise(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of an elementwise operation on tensors of one floating dtype.

    It has the shape of the one that the others are broadcast to, and lies in memory in the order of
    its dimensions there, where that of no other tensor disagrees.
    """
    tensors = [a for a in args if isinstance(a, FakeTensor)]
    if not tensors or any(isinstance(a, complex) for a in args):
        return None
    shapes = [layout(t)[0] for t in tensors]
    for full, shape in zip(tensors, shapes, strict=True):
        if all(_spreads(s, shape) for s in shapes):
            kinds = {(t.dtype, t.device) for t in tensors}
            if len(kinds) > 1 or not full.dtype.is_floating_point:
                return None
            order = dims_by_stride(full)
            if order is None or not all(falls_along(t, order) for t in tensors):
                return None
            dtype = args[1] if func is torch.ops.prims.convert_element_type.default else None
            strides = dense_strides(full.shape, order)
            return fake_like(full, full.fake_mode, dtype=dtype, strides=strides)
    return None


def _reduced(args: tuple[Any, ...]) -> Any:
    """The result of a reduction of one dimension that is kept as 1; it is row-major."""
    x, dims, keep = (*args, False)[:3]
    if not isinstance(x, FakeTensor) or not x.dtype.is_floating_point or keep is not True:
        return None
    if not isinstance(dims, (list, tuple)) or len(dims) != 1 or x.dim() < 1:
        return None
    dim = dims[0] % x.dim()
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    return fake_like(x, x.fake_mode, shape=shape)


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
