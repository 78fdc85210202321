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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import PatternError
from .known_results import known_result

__all__ = ["Call", "Decompositions", "MutationError", "Recording", "record"]

Decompositions = Mapping[Any, Callable[..., Any]]

aten = torch.ops.aten


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
        out = known_result(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
            flat, _ = tree_flatten(out)
            tensors = [t for t in flat if isinstance(t, torch.Tensor)]
            self.check_known(func, tensors)
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

    def check_known(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """Raise :class:`PatternError` for a result that depends on the elements of a tensor."""
        if torch.Tag.data_dependent_output in func.tags or any(map(free_unbacked_symbols, tensors)):
            raise PatternError(
                f"{self.what} calls {func}, whose result depends on the values of a tensor.",
                why="A rule is traced on tensors without data.",
                hint="Keep what depends on values inside one kernel.",
            )

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
