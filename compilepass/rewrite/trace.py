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

from ..errors import PatternError
from .canonical import Canonical
from .record import Decompositions, Recording, record
from .term import Shape, Size, Term, size_of

__all__ = ["TensorSpec", "Traced", "Variable", "copy_terms", "size_symbol", "trace"]


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

    A ``fixed`` value may be a size.

    ``hints`` are example values of the symbols; conditions on sizes are decided by them and kept
    as ``guards``. Raises :class:`PatternError` where the function cannot be traced.
    """
    once = functools.partial(
        _trace_once, fn, tensors, numbers, fixed, decompositions, what, hints or {}
    )
    traced, literals = once(0)
    if numbers:
        _, again = once(1)
        if literals != again:
            raise PatternError(
                f"{what} computes with its numbers ({', '.join(numbers)}) outside the graph.",
                why="Only the number itself can be read back from a match.",
                hint="Make the derived value a parameter of its own.",
            )
    return traced


def _trace_once(
    fn: Callable[..., Any],
    tensors: Mapping[str, TensorSpec],
    numbers: Sequence[str],
    fixed: Mapping[str, Any],
    decompositions: Decompositions,
    what: str,
    hints: Mapping[str, int],
    salt: int,
) -> tuple[Traced, list[Any]]:
    env = _Sizes(hints)
    shapes = {name: [env.size(s) for s in spec.shape] for name, spec in tensors.items()}
    with env.mode:
        fakes = {
            name: torch.empty(shapes[name], dtype=spec.dtype, device=spec.device)
            for name, spec in tensors.items()
        }
    fixed = {n: env.size(v) if isinstance(v, sympy.Expr) else v for n, v in fixed.items()}
    sentinels = {name: _sentinel(i, salt) for i, name in enumerate(numbers)}
    before = len(env.shape_env.guards)
    recording: Recording = record(
        fn, fakes, {**sentinels, **fixed}, mode=env.mode, decompositions=decompositions, what=what
    )
    guards = tuple(g.expr.xreplace(env.names) for g in env.shape_env.guards[before:])
    canonical = Canonical()
    canonical.add_all(recording.calls)
    variables = {value: Variable(name) for name, value in sentinels.items()}
    order: list[Term] = []
    outputs = [canonical.term(c) for c in recording.outputs]
    inputs = [canonical.term(c) for c in recording.inputs]
    for term in (*inputs, *outputs):
        assert term is not None
        _visit(term, order, set(order))
    renamed = copy_terms(order, env.names, variables)
    traced = Traced(
        {n: renamed[t] for n, t in zip(tensors, inputs, strict=True) if t is not None},
        tuple(renamed[t] for t in outputs if t is not None),
        tuple(renamed[t] for t in order),
        tuple(g for g in guards if not _is_trivial(g)),
    )
    literals = [
        (t.op, v)
        for t in traced.terms
        for _, v in t.params
        if not isinstance(v, (Variable, torch.dtype))
    ]
    return traced, literals


def _sentinel(index: int, salt: int) -> float:
    """A number with few mantissa bits, so that rounding to bfloat16 keeps it."""
    return (1.0 + (2 * index + 1 + 32 * salt) / 128.0) * 2.0**-11


class _Sizes:
    """Symbolic sizes of one trace, and the way back from PyTorch's symbols to ours."""

    def __init__(self, hints: Mapping[str, int]) -> None:
        self.shape_env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
        self.mode = FakeTensorMode(shape_env=self.shape_env)
        self.hints = hints
        self.names: dict[sympy.Symbol, sympy.Symbol] = {}
        self._symbols: dict[str, sympy.Symbol] = {}

    def size(self, size: Size) -> Any:
        if isinstance(size, int):
            return size
        known = {s: self._symbol(s) for s in sorted(size.free_symbols, key=str)}
        expr = size.xreplace(known)
        hint = int(
            expr.xreplace({s: sympy.Integer(self._hint(n)) for n, s in self._symbols.items()})
        )
        return self.shape_env.create_symintnode(expr, hint=hint)

    def _symbol(self, symbol: sympy.Symbol) -> sympy.Symbol:
        name = symbol.name
        if name not in self._symbols:
            example = torch.empty(self._hint(name), device="meta")
            context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
            fake = self.mode.from_tensor(example, symbolic_context=context)
            size: Any = fake.shape[0]
            made = size.node.expr
            self._symbols[name] = made
            self.names[made] = symbol
        return self._symbols[name]

    def _hint(self, name: str) -> int:
        if name not in self.hints:
            position = (
                list(self._symbols).index(name) if name in self._symbols else len(self._symbols)
            )
            return 48 + 32 * position
        return self.hints[name]


def _is_trivial(guard: sympy.Basic) -> bool:
    """Conditions that set sizes of 0 and 1 apart, where the recorded operations are the same."""
    if isinstance(guard, (sympy.StrictGreaterThan, sympy.GreaterThan, sympy.Ne)):
        return bool(guard.rhs.is_number and guard.rhs <= 2)
    return bool(guard == sympy.true)


def _visit(term: Term, order: list[Term], seen: set[Term]) -> None:
    if term in seen:
        return
    seen.add(term)
    for arg in term.args:
        _visit(arg, order, seen)
    order.append(term)


def copy_terms(
    terms: Sequence[Term],
    sizes: Mapping[Any, Any],
    values: Mapping[Any, Any],
    *,
    replaced: Mapping[Term, Term] | None = None,
    owners: tuple[Any, ...] = (),
) -> dict[Term, Term]:
    """Copy terms (in topological order) with sizes and literal values substituted."""
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

    new: dict[Term, Term] = dict(replaced or {})
    for term in terms:
        if term in new:
            continue
        new[term] = Term(
            term.op,
            tuple(new[a] for a in term.args),
            tuple((k, value(v)) for k, v in term.params),
            shape=shape(term.shape),
            dtype=term.dtype,
            seen=tuple(shape(s) for s in term.seen),
            owners=owners,
        )
    return new


def _size(size: Size, sizes: Mapping[Any, Any]) -> Size:
    if isinstance(size, int):
        return size
    if isinstance(size, sympy.Symbol):
        return sizes.get(size, size)
    return size_of(size.xreplace(sizes))
