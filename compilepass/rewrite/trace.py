"""Trace a pure function into canonical terms over named sizes and numbers.

Sizes are symbols written ``$H`` (so that they never meet a symbol of a graph), numbers that vary
are :class:`Variable` s. A number is traced as a sentinel, a value that is exact in every floating
dtype and that no model uses; a number derived from it (``1 / eps``) would be invisible, so the
function is traced a second time with other sentinels and must give the same literals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_flatten

from ..errors import PatternError
from .canonical import Canonical
from .record import Decompositions, Recording, record
from .size_facts import without_facts
from .term import Shape, Size, Term, size_of

__all__ = ["TensorSpec", "Traced", "Variable", "size_symbol", "substituted", "trace"]


@dataclass(frozen=True)
class Variable:
    """A number of a pattern that takes its value from the match."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class TensorSpec:
    """A tensor input: sizes in ``$`` symbols, dtype and device type."""

    shape: Shape
    dtype: torch.dtype
    device: str = "cpu"


@dataclass(frozen=True)
class Traced:
    """A function as terms. ``terms`` are in topological order, inputs first."""

    inputs: dict[str, Term]
    outputs: tuple[Term, ...]
    terms: tuple[Term, ...]
    guards: tuple[sympy.Basic, ...]


def size_symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(f"${name}", integer=True, positive=True)


def trace(
    fn: Callable[..., Any],
    tensors: Mapping[str, TensorSpec],
    numbers: Sequence[str],
    fixed: Mapping[str, Any],
    *,
    decompositions: Decompositions,
    what: str,
    hints: Mapping[str, int] | None = None,
) -> Traced:
    """Trace ``fn(**tensors, **numbers, **fixed)``; ``numbers`` become variables.

    A ``fixed`` value may be a size. ``hints`` are example values of the symbols; conditions on
    sizes are decided by them and kept as ``guards``. Raises :class:`PatternError` where the
    function cannot be traced.
    """
    run = functools.partial(_record, fn, tensors, numbers, fixed, decompositions, what)
    sizes = _spare.pop() if _spare and not hints else _Sizes(hints or {})
    recording, sentinels = run(sizes, salt=0)
    if numbers:
        again = run(_Sizes(hints or {}, symbolic=False), salt=1)
        if _literals(recording, sentinels) != _literals(*again):
            raise PatternError(
                f"{what} computes with its numbers ({', '.join(numbers)}) outside the graph.",
                why="Only the number itself can be read back from a match.",
                hint="Make the derived value a parameter of its own.",
            )
    canonical = Canonical()
    inputs = [canonical.term(c) for c in recording.inputs]
    outputs = [canonical.term(c) for c in recording.outputs]
    order = _in_order([t for t in (*inputs, *outputs) if t is not None])
    guards = sizes.take_guards()
    if not guards and not hints:
        _spare.append(sizes)
    renamed = substituted(order, sizes.names, {v: Variable(n) for v, n in sentinels.items()})
    return Traced(
        {n: renamed[t] for n, t in zip(tensors, inputs, strict=True) if t is not None},
        tuple(renamed[t] for t in outputs if t is not None),
        tuple(renamed[t] for t in order),
        guards,
    )


def _record(
    fn: Callable[..., Any],
    tensors: Mapping[str, TensorSpec],
    numbers: Sequence[str],
    fixed: Mapping[str, Any],
    decompositions: Decompositions,
    what: str,
    sizes: _Sizes,
    *,
    salt: int,
) -> tuple[Recording, dict[float, str]]:
    """The recorded calls, and which literal stands for which number."""
    sizes.declare([s for spec in tensors.values() for s in spec.shape])
    fakes = dict(zip(tensors, sizes.inputs(list(tensors.values())), strict=True))
    values = {n: sizes.size(v) if isinstance(v, sympy.Expr) else v for n, v in fixed.items()}
    values.update({name: _sentinel(i, salt) for i, name in enumerate(numbers)})
    recording = record(fn, fakes, values, mode=sizes.mode, decompositions=decompositions, what=what)
    return recording, {_sentinel(i, salt): name for i, name in enumerate(numbers)}


def _literals(recording: Recording, sentinels: Mapping[float, str]) -> list[tuple[str, ...]]:
    """The operations with their floating point literals, sentinels by name."""
    out = []
    for call in recording.calls:
        flat = [a for a in tree_flatten((call.args, call.kwargs))[0] if isinstance(a, float)]
        out.append((str(call.target), *(sentinels.get(a, repr(a)) for a in flat)))
    return out


def _sentinel(index: int, salt: int) -> float:
    """A number with few mantissa bits, so that rounding to bfloat16 keeps it."""
    return (1.0 + (2 * index + 1 + 32 * salt) / 128.0) * 2.0**-11


class _Sizes:
    """The sizes of a trace: symbols of PyTorch's with the way back to ours, or examples.

    They take long to make, so one that has learned nothing of its sizes serves the next trace too.
    """

    def __init__(self, hints: Mapping[str, int], *, symbolic: bool = True) -> None:
        self._env = ShapeEnv(duck_shape=False, specialize_zero_one=False) if symbolic else None
        if self._env is not None:
            without_facts(self._env)
        self.mode = FakeTensorMode(shape_env=self._env)
        self.mode.cache_enabled = False  # it keys on sizes in full, which costs more than it saves
        self._hints = dict(hints)
        self._taken = 0
        self._inputs: dict[TensorSpec, list[torch.Tensor]] = {}
        self.names: dict[sympy.Symbol, sympy.Symbol] = {}  # PyTorch's symbol to ours
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}  # ours to PyTorch's

    def size(self, size: Size) -> Any:
        if isinstance(size, int):
            return size
        symbols = sorted(size.free_symbols, key=str)
        hint = int(size.xreplace({s: sympy.Integer(self._hint(s)) for s in symbols}))
        if self._env is None:
            return hint
        expr = size.xreplace({s: self._symbol(s) for s in symbols})
        return self._env.create_symintnode(expr, hint=hint)

    def inputs(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """A fake tensor for each input, which later traces get again."""
        found = []
        for i, spec in enumerate(specs):
            known = self._inputs.setdefault(spec, [])
            place = specs[:i].count(spec)
            if place == len(known):
                shape = [self.size(s) for s in spec.shape]
                with self.mode:
                    known.append(torch.empty(shape, dtype=spec.dtype, device=spec.device))
            found.append(known[place])
        return found

    def take_guards(self) -> tuple[sympy.Basic, ...]:
        """The conditions on sizes under which what was recorded since the last time is right."""
        every = self._env.guards if self._env is not None else []
        new, self._taken = every[self._taken :], len(every)
        found = [g.expr.xreplace(self.names) for g in new]
        return tuple([g for g in found if not _is_trivial(g)])

    def declare(self, sizes: Sequence[Size]) -> None:
        """Make the symbols of ``sizes``, all by one example tensor, since each one takes long."""
        found = {x for s in sizes if not isinstance(s, int) for x in s.free_symbols}
        new = sorted(found - self._symbols.keys(), key=str)
        if self._env is None or not new:
            return
        example = torch.empty([self._hint(s) for s in new], device="meta")
        context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(new))
        made: Any = self.mode.from_tensor(example, symbolic_context=context).shape
        for symbol, size in zip(new, made, strict=True):
            self._symbols[symbol] = size.node.expr
            self.names[size.node.expr] = symbol

    def _symbol(self, symbol: sympy.Symbol) -> sympy.Symbol:
        self.declare([symbol])
        return self._symbols[symbol]

    def _hint(self, symbol: sympy.Symbol) -> int:
        return self._hints.setdefault(symbol.name, 48 + 32 * len(self._hints))


_spare: list[_Sizes] = []  # a trace takes one out while it runs, so threads share none


@functools.lru_cache(4096)  # most patterns have the same ones
def _is_trivial(guard: sympy.Basic) -> bool:
    """Conditions that set sizes of 0 and 1 apart, where the recorded operations are the same.

    Those on strides compare products of sizes: ``H < S * H`` holds for all sizes from 2 on.
    """
    if guard == sympy.true:
        return True
    holds = _HOLDS.get(type(guard))
    if holds is None:
        return False
    if not isinstance(guard, (sympy.StrictLessThan, sympy.LessThan)) and guard.rhs.is_number:
        return bool(guard.rhs <= 2)
    larger = {s: 2 + sympy.Dummy(integer=True, nonnegative=True) for s in guard.free_symbols}
    return bool(holds(sympy.expand((guard.lhs - guard.rhs).xreplace(larger))))


_HOLDS: dict[type, Callable[[Any], bool | None]] = {
    sympy.StrictGreaterThan: lambda difference: difference.is_positive,
    sympy.GreaterThan: lambda difference: difference.is_nonnegative,
    sympy.StrictLessThan: lambda difference: difference.is_negative,
    sympy.LessThan: lambda difference: difference.is_nonpositive,
    sympy.Ne: lambda difference: difference.is_nonzero,
}


def _in_order(terms: Sequence[Term]) -> list[Term]:
    """``terms`` and all that they are computed from, operands first."""
    order: dict[Term, None] = {}

    def visit(term: Term) -> None:
        if term not in order:
            for arg in term.args:
                visit(arg)
            order[term] = None

    for term in terms:
        visit(term)
    return list(order)


def substituted(
    terms: Sequence[Term], sizes: Mapping[Any, Any], values: Mapping[Any, Any]
) -> dict[Term, Term]:
    """Copies of terms (in topological order) with other sizes and literal values."""
    cache: dict[Shape, Shape] = {}

    def shape(old: Shape | None) -> Shape | None:
        if old is None:
            return None
        if old not in cache:
            cache[old] = tuple(_size(s, sizes) for s in old)
        return cache[old]

    def value(old: Any) -> Any:
        if isinstance(old, tuple):
            return tuple(value(v) for v in old)
        if isinstance(old, (float, Variable)):
            return values.get(old, old)
        return _size(old, sizes) if isinstance(old, sympy.Expr) else old

    new: dict[Term, Term] = {}
    for term in terms:
        new[term] = Term(
            term.op,
            tuple(new[a] for a in term.args),
            tuple((k, value(v)) for k, v in term.params),
            shape=shape(term.shape),
            dtype=term.dtype,
            seen=tuple(shape(s) for s in term.seen),
        )
    return new


def _size(size: Size, sizes: Mapping[Any, Any]) -> Size:
    if isinstance(size, int):
        return size
    if isinstance(size, sympy.Symbol):
        return sizes.get(size, size)
    return size_of(size.xreplace(sizes))
