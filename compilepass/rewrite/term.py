"""Terms: the form in which patterns and graphs are compared.

Both are turned into the same canonical terms (:mod:`.canonical`), and a pattern matches where its
terms unify with those of the graph. What makes this independent of rank is one invariant:

    a pattern value and the graph value bound to it hold the same elements in row-major order.

So views that keep that order are transparent, a leading pattern size ``T`` may stand for several
graph dimensions ``B, S``, and what has to be checked at an operation is only that it works along
the same groups of dimensions (:func:`align`, :func:`broadcast_axes`).
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Protocol, TypeAlias

import sympy
import torch
from torch.fx import Node

from .size_facts import known

__all__ = [
    "BROADCASTS",
    "Shape",
    "Size",
    "Term",
    "align",
    "broadcast_axes",
    "const",
    "product",
    "size_of",
]

#: what an input of a pattern has as its ``params`` where its leading dimensions may be of size 1
BROADCASTS: tuple[tuple[str, Any], ...] = (("broadcasts", True),)

Size: TypeAlias = Any  # an int or a sympy expression; sympy has no types
Shape: TypeAlias = tuple[Size, ...]

_REMEMBERED = 8192  # results of functions of shapes

_READ = ("op", "args", "params", "seen", "shape", "owners")


class Reader(Protocol):
    """Reads what a term of a graph node is, when something about it is asked for."""

    def fill(self, term: Term) -> None: ...
    def shape_of(self, node: Any) -> Shape | None: ...


class Term:
    """One canonical operation.

    ``node`` is the graph node that holds the value (``None`` for a value that exists only inside
    an expanded kernel or a rewritten spelling); ``owners`` are the nodes that disappear when the
    value is replaced. ``seen`` has, per argument, the shape in which it is used, which transparent
    views may have changed.

    A term made with :meth:`unread` knows its node and dtype; the rest is read at the first access,
    since rules look at a small part of a graph.
    """

    __slots__ = ("_reader", "args", "dtype", "node", "op", "owners", "params", "seen", "shape")

    def __init__(
        self,
        op: str,
        args: tuple[Term, ...] = (),
        params: tuple[tuple[str, Any], ...] = (),
        *,
        shape: Shape | None = None,
        dtype: torch.dtype | None = None,
        seen: tuple[Shape | None, ...] | None = None,
        node: Node | None = None,
        owners: tuple[Node, ...] = (),
    ) -> None:
        self._reader: Reader | None = None
        self.op, self.args, self.params = op, args, params
        self.shape, self.dtype = shape, dtype
        self.seen = tuple([a.shape for a in args]) if seen is None else seen
        self.node, self.owners = node, owners

    @classmethod
    def unread(cls, node: Any, dtype: torch.dtype | None, reader: Reader) -> Term:
        term = cls.__new__(cls)
        term.node, term.dtype, term._reader = node, dtype, reader
        return term

    def __getattr__(self, name: str) -> Any:
        if name not in _READ or self._reader is None:
            raise AttributeError(name)
        if name == "shape":
            self.shape = self._reader.shape_of(self.node)
        else:
            self._reader.fill(self)
        return getattr(self, name)

    @property
    def is_read(self) -> bool:
        return self._reader is None

    @property
    def is_there(self) -> bool:
        """Whether the nodes that compute it are still in the graph."""
        return not any(node._erased for node in self.owners)

    def become(self, other: Term) -> None:
        """Say what ``other`` says; the node stays."""
        self._reader = None
        self.op, self.args, self.params = other.op, other.args, other.params
        self.shape, self.dtype = other.shape, other.dtype
        self.seen, self.owners = other.seen, other.owners

    def forget(self, node: Any, reader: Reader) -> None:
        """Be the unread value of ``node``, which has the same dtype."""
        if self.is_read:
            for slot in _READ:
                delattr(self, slot)
        else:
            with contextlib.suppress(AttributeError):  # not asked for yet
                del self.shape
        self.node, self._reader = node, reader

    def param(self, name: str) -> Any:
        for key, value in self.params:
            if key == name:
                return value
        return None

    @property
    def is_const(self) -> bool:
        return self.node is None and self.op == "const"  # without reading a graph's value

    @property
    def broadcasts(self) -> Term | None:
        """The input that this is, perhaps cast, if its leading dimensions may be of size 1."""
        if self.op == "cast":
            return self.args[0].broadcasts
        return self if self.op == "input" and self.params == BROADCASTS else None

    @property
    def value(self) -> Any:
        """The number that a ``const`` term stands for."""
        return self.params[0][1]

    def __repr__(self) -> str:
        if self.is_const:
            return repr(self.value)
        inner = [a.op if not a.is_const else repr(a.value) for a in self.args]
        inner += [f"{k}={v}" for k, v in self.params]
        return f"{self.op}({', '.join(inner)})"


def const(value: Any) -> Term:
    return Term("const", params=(("value", value),))


def size_of(value: Any) -> Size:
    """An ``int``, ``SymInt`` or sympy expression as a plain ``int`` or sympy expression."""
    if isinstance(value, int):
        return value
    expr = known(value) if isinstance(value, torch.SymInt) else value
    return int(expr) if isinstance(expr, sympy.Integer) else expr


def product(sizes: tuple[Size, ...] | list[Size]) -> Size:
    out: Size = 1
    for s in sizes:
        out = s if isinstance(out, int) and out == 1 else out * s
    return out


def same(a: Size, b: Size) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b) or _are_equal(a, b)


@functools.lru_cache(_REMEMBERED)
def _are_equal(a: Size, b: Size) -> bool:
    return bool(sympy.expand(a - b) == 0)


def align(pattern: Shape, found: Shape, dims: dict[str, Size]) -> list[tuple[int, ...]] | None:
    """Group the dimensions of ``found`` under those of ``pattern``, binding free sizes in ``dims``.

    Returns, per pattern dimension, the dimensions of ``found`` that it stands for (none for a size
    of 1), or ``None`` where the two shapes cannot hold the same rows. Sizes are bound from the
    right; the leftmost free size takes all dimensions that are left. ``dims`` is only written to
    on success.
    """
    aligned = _aligned(pattern, found, tuple(dims.items()))
    if aligned is None:
        return None
    groups, new = aligned
    dims.update(new)
    return groups


@functools.lru_cache(_REMEMBERED)  # a deep model has the same few shapes everywhere
def _aligned(
    pattern: Shape, found: Shape, known: tuple[tuple[str, Size], ...]
) -> tuple[list[tuple[int, ...]], dict[str, Size]] | None:
    dims = dict(known)
    new: dict[str, Size] = {}
    groups: list[tuple[int, ...]] = [()] * len(pattern)
    j = len(found) - 1
    for i in range(len(pattern) - 1, -1, -1):
        want = _substitute(pattern[i], dims, new)
        if isinstance(want, int) and want == 1:
            continue
        while j >= 0 and found[j] == 1:
            j -= 1
        free = _free_symbols(want, dims, new)
        if not free:
            taken: list[int] = []
            have: Size = 1
            while not same(have, want):
                if j < 0:
                    return None
                have = have * found[j] if taken else found[j]
                if isinstance(have, int) and isinstance(want, int) and have > want:
                    return None
                taken.append(j)
                j -= 1
            groups[i] = tuple(k for k in reversed(taken) if found[k] != 1)
            continue
        if len(free) > 1:
            return None
        take = tuple(range(j + 1)) if i == 0 else ((j,) if j >= 0 else ())
        value = _solve(want, free[0], product([found[k] for k in take]))
        if value is None:
            return None
        new[free[0]] = value
        groups[i] = tuple(k for k in take if found[k] != 1)
        j -= len(take)
    if any(found[k] != 1 for k in range(j + 1)):
        return None
    return groups, new


def broadcast_axes(operand: Shape, out: Shape) -> tuple[bool, ...]:
    """For each dimension of ``out``, whether ``operand`` varies along it."""
    pad = len(out) - len(operand)
    return tuple(
        i >= pad and not (isinstance(operand[i - pad], int) and operand[i - pad] == 1)
        for i in range(len(out))
    )


def _substitute(size: Size, dims: dict[str, Size], new: dict[str, Size]) -> Size:
    if isinstance(size, int):
        return size
    if isinstance(size, sympy.Symbol):
        name = size.name
        return new[name] if name in new else dims.get(name, size)
    known = {
        s: new.get(s.name, dims.get(s.name))
        for s in size.free_symbols
        if s.name in new or s.name in dims
    }
    return size_of(size.xreplace(known)) if known else size


def _free_symbols(size: Size, dims: dict[str, Size], new: dict[str, Size]) -> list[str]:
    """Pattern symbols still without a value (the graph's own symbols are values, not variables)."""
    if isinstance(size, int):
        return []
    return [s.name for s in size.free_symbols if s.name.startswith("$")]


def _solve(expr: Size, name: str, value: Size) -> Size | None:
    """Solve ``expr(name) == value`` for a size; ``None`` where there is no whole solution."""
    if isinstance(expr, sympy.Symbol):
        return value
    symbol = next(s for s in expr.free_symbols if s.name == name)
    rest, factor = (
        sympy.Poly(expr, symbol).all_coeffs()[::-1] if _is_linear(expr, symbol) else (None, None)
    )
    if factor is None:
        return None
    quotient = sympy.simplify((value - rest) / factor)
    if quotient.is_integer is False or (quotient.is_number and not quotient.is_Integer):
        return None
    return size_of(quotient)


def _is_linear(expr: Any, symbol: sympy.Symbol) -> bool:
    return bool(expr.is_polynomial(symbol)) and sympy.degree(expr, symbol) == 1
