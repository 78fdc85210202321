"""Run a Python function on fake tensors and record the operations it dispatches.

Patterns, kernel expansions and replacements all go through this one recorder. Tensors are fake
(no data, real or symbolic sizes), sizes and numbers stay Python values inside the recorded
arguments, so that the caller can read them as expressions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import PatternError
from ..torch_compat import fake_like
from .layout import in_order, is_row_major, layout
from .term import Shape, same

__all__ = ["Call", "Decompositions", "MutationError", "Recording", "record"]

Decompositions = Mapping[Any, Callable[..., Any]]

aten = torch.ops.aten

#: those whose result has the dtype of their floating operands
_ELEMENTWISE = frozenset(
    getattr(aten, name)
    for name in (
        *("abs", "add", "clamp_max", "clamp_min", "cos", "div", "erf", "exp", "maximum"),
        *("minimum", "mul", "neg", "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sin"),
        *("sqrt", "sub", "tanh"),
    )
)


class MutationError(PatternError):
    """A function that should be pure writes to one of its values."""


@dataclass(eq=False)
class Call:
    """One recorded operation, shaped like a :class:`torch.fx.Node` so that both can be read alike.

    It is no ``Node``, since those do not take symbolic sizes as arguments.
    """

    op: str  # "placeholder" or "call_function"
    name: str
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Recording:
    """The recorded operations in order, inputs first, and those that hold the outputs."""

    calls: list[Call]
    inputs: list[Call]
    outputs: list[Call]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, decompositions: Decompositions, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.decompositions = decompositions
        self.what = what
        self.holders: dict[int, Call] = {}
        self.alive: list[torch.Tensor] = []  # keeps ids unique while we map them

    def add(self, op: str, name: str, target: Any, args: Any, kwargs: Any, val: Any) -> Call:
        call = Call(op, name, target, args, kwargs, {"val": val})
        self.calls.append(call)
        if isinstance(val, torch.Tensor):
            self.holders[id(val)] = call
            self.alive.append(val)
        return call

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        decompose = self.decompositions.get(func)
        if decompose is not None:
            with self:
                out = decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if func.namespace != "prim":  # prim::device and the like are not in the dispatcher
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        functional = self.functional(func, args) if func._schema.is_mutable else func
        out = _elementwise(func, args, kwargs)
        if out is None:
            out = _joined(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        flat, _ = tree_flatten(out)
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        if torch.Tag.data_dependent_output in func.tags or any(map(free_unbacked_symbols, tensors)):
            raise PatternError(
                f"{self.what} calls {func}, whose result depends on the values of a tensor.",
                why="A rule is traced on tensors without data.",
                hint="Keep what depends on values inside one kernel.",
            )
        if not tensors:
            return out
        func = functional
        if func is aten.view.default:
            func = aten.reshape.default  # the form that views have when passes see the graph
        call_args, call_kwargs = tree_map(self.holder, (args, kwargs))
        name = f"{func.overloadpacket.__name__}_{len(self.calls)}"
        call = self.add("call_function", name, func, call_args, call_kwargs, out)
        if not isinstance(out, torch.Tensor):
            for i, item in enumerate(out):
                if isinstance(item, torch.Tensor):
                    self.add("call_function", f"{name}_{i}", operator.getitem, (call, i), {}, item)
        return out

    def functional(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The out-of-place form of an in-place operation on a temporary that has no view."""
        form = getattr(aten, func.overloadpacket.__name__.rstrip("_"), None)
        form = getattr(form, func._overloadname, None)
        target = args[0] if args else None
        holder = self.holders.get(id(target))
        if (
            not isinstance(target, torch.Tensor)
            or form is None
            or form._schema.is_mutable
            or holder is None
            or holder.op == "placeholder"
            or self.has_view(target)
        ):
            raise MutationError(
                f"{self.what} calls {func}, which changes a value in place.",
                why="A rule is a pure function of its inputs.",
                hint="Use the operation's out-of-place form.",
            )
        return form

    def has_view(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return any(t is not tensor and t.untyped_storage()._cdata == storage for t in self.alive)

    def holder(self, value: Any) -> Any:
        """The call that holds a tensor; any other value as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        call = self.holders.get(id(value))
        if call is None:
            raise PatternError(
                f"{self.what} uses a tensor that is not one of its inputs "
                f"(shape {tuple(value.shape)}, {value.dtype}).",
                why="A tensor from a closure would be frozen into the rule.",
                hint="Pass it as an input, or build it inside from the inputs.",
            )
        return call


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an elementwise operation on tensors of one floating dtype, in row-major order.

    It has the shape of the one that the others are broadcast to. Working that out costs PyTorch a
    hundred times as much where sizes are symbols. ``None`` for other calls.
    """
    is_cast = func is torch.ops.prims.convert_element_type.default
    if kwargs or not (is_cast or func.overloadpacket in _ELEMENTWISE):
        return None
    tensors = [a for a in args if isinstance(a, FakeTensor)]
    if not tensors or any(isinstance(a, complex) for a in args):
        return None
    shapes = [layout(t)[0] for t in tensors]
    for full, shape in zip(tensors, shapes, strict=True):
        if all(_spreads(s, shape) for s in shapes):
            kinds = {(t.dtype, t.device) for t in tensors}
            if len(kinds) > 1 or not full.dtype.is_floating_point:
                return None
            if not all(map(in_order, tensors)):
                return None
            dtype = args[1] if is_cast else None
            shape = None if is_row_major(full) else tuple(full.shape)
            return fake_like(full, full.fake_mode, dtype=dtype, shape=shape)
    return None


def _joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a concatenation along the last dimension, which is row-major; else ``None``."""
    if func is not aten.cat.default or kwargs or len(args) != 2:
        return None
    tensors, dim = args
    if not tensors or not all(isinstance(t, FakeTensor) and in_order(t) for t in tensors):
        return None
    first = tensors[0]
    kinds = {(t.dtype, t.device, layout(t)[0][:-1]) for t in tensors}
    if len(kinds) > 1 or first.dim() < 1 or dim not in (-1, first.dim() - 1):
        return None
    shape = (*first.shape[:-1], sum(t.shape[-1] for t in tensors))
    return fake_like(first, first.fake_mode, shape=shape)


def _spreads(shape: Shape, over: Shape) -> bool:
    """Whether a tensor of ``shape`` is broadcast to ``over``, as far as it is known."""
    if len(shape) > len(over):
        return False
    ends = zip(reversed(shape), reversed(over), strict=False)
    return all((type(s) is int and s == 1) or same(s, o) for s, o in ends)


def record(
    fn: Callable[..., Any],
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    *,
    mode: FakeTensorMode,
    decompositions: Decompositions,
    what: str,
) -> Recording:
    """Record ``fn(**tensors, **values)``.

    ``tensors`` are fake tensors of ``mode``; ``what`` names the function in errors, for example
    ``"pattern 'norm_quant' (norm_quant.py:12)"``. Raises :class:`PatternError` for a mutation, for
    a tensor that is no input, and for an output that is not a tensor.
    """
    recorder = _Recorder(decompositions, what)
    inputs = [
        recorder.add("placeholder", name, name, (), {}, tensor) for name, tensor in tensors.items()
    ]
    with torch.no_grad(), mode, recorder:
        out = fn(**tensors, **values)
    return Recording(recorder.calls, inputs, [recorder.holder(t) for t in _as_outputs(out, what)])


def _as_outputs(out: Any, what: str) -> tuple[torch.Tensor, ...]:
    outs = [out] if isinstance(out, torch.Tensor) else out
    if not isinstance(outs, (tuple, list)) or not outs:
        raise PatternError(f"{what} returns {type(out).__name__}.", hint="Return tensors.")
    for item in outs:
        if not isinstance(item, torch.Tensor):
            raise PatternError(
                f"{what} returns {type(item).__name__} among its outputs.",
                hint="Return a tensor or a flat tuple of tensors.",
            )
    return tuple(outs)
