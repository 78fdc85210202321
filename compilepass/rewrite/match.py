"""Unify a pattern's terms with those of a graph.

The search starts at one output of the pattern and walks down its operands; commuted operands are
the only choice points. Whatever fails is kept as a :class:`Failure` with as few formatted strings
as possible, since most candidates fail at their first operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from .operations import kind_of
from .term import Shape, Size, Term, align, broadcast_axes, product, same, size_of
from .trace import Variable

__all__ = ["Bindings", "Failure", "Unifier", "commutes"]

_Mark = tuple[int, dict[str, Size], dict[str, Any], dict[Term | None, Shape]]

_COMMUTES = frozenset(
    ["add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or", "bitwise_and"]
)


@dataclass(frozen=True)
class Failure:
    """Where the best attempt stopped: raw values, formatted only when a near miss is shown."""

    code: str
    pattern: Term
    found: Term
    expected: Any = None
    actual: Any = None
    what: str = ""
    user: Term | None = None  # what has ``found`` as its operand, where that is a number
    matched: int = 0
    bound: tuple[Term, ...] = ()  # what stands for the pattern's terms so far


@dataclass(frozen=True)
class Bindings:
    """A pattern's terms, sizes and numbers, each with what it stands for in the graph.

    Where inputs broadcast, ``leading`` has the leading sizes of each of them as it is used, and
    under ``None`` those of the others.
    """

    terms: dict[Term, Term]
    dims: dict[str, Size]
    numbers: dict[str, Any]
    leading: dict[Term | None, Shape] = field(default_factory=dict)

    @property
    def inner(self) -> list[Term]:
        """What stands for the pattern's operations."""
        return [t for p, t in self.terms.items() if p.op not in ("input", "const")]

    @property
    def covered(self) -> dict[Node, None]:
        """The nodes that compute it, in the order in which they were matched."""
        return dict.fromkeys(n for t in self.inner for n in t.owners)


class Unifier:
    """One attempt to match a pattern. Use a new one per attempt.

    ``exact`` compares numbers as they are, for patterns in float64. Anything may stand for ``gap``,
    a term of the pattern.
    """

    def __init__(self, *, exact: bool = False, gap: Term | None = None) -> None:
        self._terms: dict[Term, Term] = {}
        self._exact_numbers = exact
        self._gap = gap
        self._order: list[Term] = []
        self._dims: dict[str, Size] = {}
        self._numbers: dict[str, Any] = {}
        self._leading: dict[Term | None, Shape] = {}
        self._furthest = -1
        self._looked_at: list[Term] = []  # whose operation is the pattern's
        self.failure: Failure | None = None

    def match(self, pattern: Term, found: Term) -> Bindings | None:
        """Match from the pattern's output; ``failure`` says why not, if it came past the first."""
        if commutes(pattern) and not self._may_commute(pattern, found):
            return None
        if not self._all(((pattern, found, found), None)):
            return None
        return Bindings(self._terms, self._dims, self._numbers, self._leading)

    def extend(self, pattern: Term, found: Term) -> bool:
        """Match one more term in agreement with what is bound; nothing changes where it fails."""
        mark = self._mark()
        self._furthest, self.failure = -1, None
        if self._all(((pattern, found, found), None)):
            return True
        self._undo(mark)
        return False

    @property
    def terms(self) -> dict[Term, Term]:
        return self._terms

    def stayed_inside(self, owners: tuple[Node, ...]) -> bool:
        """Whether it saw only what ``owners`` compute, and of their operands op and layout."""
        return all(t.owners == owners for t in self._looked_at)

    @property
    def matched(self) -> int:
        """How many operations are bound."""
        return sum(1 for p in self._order if p.op != "input" and p is not self._gap)

    # -- search --------------------------------------------------------------------------------

    def _all(self, goals: Any) -> bool:
        while goals is not None:
            (p, t, user), goals = goals
            if p.op == "const" and p is not self._gap:
                if not self._number(p, t, user):
                    return False
                continue
            bound = self._terms.get(p)
            if bound is not None:
                if bound is not t:
                    return self._fail("binding", p, t, bound, t)
                continue
            if p is not self._gap and not self._node(p, t):
                return False
            self._terms[p] = t
            self._order.append(p)
            if p.op == "input" or p is self._gap:
                continue
            if commutes(p):
                return self._commuted(p, t, goals)
            if not self._operation(p, t, t.args, t.seen):
                return False
            for want, have in zip(reversed(p.args), reversed(t.args), strict=True):
                goals = ((want, have, t), goals)
        return True

    def _commuted(self, p: Term, t: Term, goals: Any) -> bool:
        tried = False
        for turn in (1, -1):
            args, seen = t.args[::turn], t.seen[::turn]
            if turn == -1 and args[0] is args[1]:
                break
            if not self._may_match(p.args[0], args[0]) or not self._may_match(p.args[1], args[1]):
                continue
            tried = True
            mark = self._mark()
            if self._operation(p, t, args, seen):
                rest = ((p.args[0], args[0], t), ((p.args[1], args[1], t), goals))
                if self._all(rest):
                    return True
            self._undo(mark)
        return self._fail_operands(p, t) if not tried else False

    def _may_match(self, p: Term, t: Term) -> bool:
        """Whether it is worth a try: most orders of two operands are not."""
        if p is self._gap:
            return True
        if p.op == "const":
            return t.is_const or t.shape == ()
        if p.op == "input":
            return not t.is_const and p.dtype == t.dtype
        return p.op == t.op and p.dtype == t.dtype

    def _may_commute(self, p: Term, t: Term) -> bool:
        if len(t.args) != 2:
            return True
        return any(
            self._may_match(p.args[0], args[0]) and self._may_match(p.args[1], args[1])
            for args in (t.args, t.args[::-1])
        )

    def _mark(self) -> _Mark:
        return len(self._order), dict(self._dims), dict(self._numbers), dict(self._leading)

    def _undo(self, mark: _Mark) -> None:
        length, self._dims, self._numbers, self._leading = mark
        for term in self._order[length:]:
            self._terms.pop(term, None)
        del self._order[length:]

    def _fail(
        self,
        code: str,
        p: Term,
        t: Term,
        expected: Any = None,
        actual: Any = None,
        what: str = "",
        user: Term | None = None,
        shape: Shape | None = None,
    ) -> bool:
        """Keep why this attempt ended, if none came further; ``shape`` is the pattern's."""
        reached = len(self._order)
        if reached > self._furthest:
            if shape is not None:
                expected = self._known(shape)
            self._furthest = reached
            matched = sum(1 for q in self._order if q.op != "input" and q is not p)
            matched -= p.op in ("input", "const")  # then its user is what does not fit
            bound = (t, *self._terms.values())
            self.failure = Failure(code, p, t, expected, actual, what, user, matched, bound)
        return False

    def _fail_operands(self, p: Term, t: Term) -> bool:
        """Blame the operand that fits in neither place, in the order in which most others fit."""

        def misfits(args: tuple[Term, ...]) -> list[tuple[Term, Term]]:
            pairs = zip(p.args, args, strict=True)
            return [(want, have) for want, have in pairs if not self._may_match(want, have)]

        want, have = min(
            (misfits(t.args), misfits(t.args[::-1])),
            key=lambda m: (len(m), sum(want.op != "input" for want, _ in m)),
        )[0]
        if want.op in ("input", have.op) and not have.is_const:
            return self._fail("dtype", want, have, want.dtype, have.dtype, user=t)
        return self._fail("op", want, have, want, have, user=t)

    # -- one operation -------------------------------------------------------------------------

    def _node(self, p: Term, t: Term) -> bool:
        """Operation, dtype and shape of one value."""
        if p.op != "input":
            if p.op != t.op:
                return self._fail("op", p, t)
            self._looked_at.append(t)
            if len(p.args) != len(t.args):
                return self._fail("arity", p, t, len(p.args), len(t.args))
        elif t.is_const:
            return self._fail("op", p, t, "a tensor", t.value)
        if p.dtype != t.dtype:
            return self._fail("dtype", p, t, p.dtype, t.dtype)
        if p.shape is None or t.shape is None:
            return p.shape is None and t.shape is None
        if p.broadcasts is not None:  # its shape is what it is where it is used
            return True
        if align(p.shape, t.shape, self._dims) is None and not self._is_viewed(p, t):
            return self._fail("shape", p, t, actual=t.shape, shape=p.shape)
        return True

    def _is_viewed(self, p: Term, t: Term) -> bool:
        """Whether an input has as many elements as wanted: its users see them in their shape.

        A projection ``[tokens, heads * D]`` is an input of heads that are ``D`` wide.
        """
        assert p.shape is not None and t.shape is not None
        if p.op != "input":
            return False
        return same(product(self._known(p.shape)), product(t.shape))

    def _operation(
        self, p: Term, t: Term, args: tuple[Term, ...], seen: tuple[Shape | None, ...]
    ) -> bool:
        """What the operation does: along which dimensions, and with which other arguments."""
        kind = kind_of(p.op)
        if kind == "pointwise":
            if not self._broadcast(p, t, seen):
                return False
        elif not self._axes(p, t, seen, kind):
            return False
        return self._params(p, t, skip="dim" if kind in ("reduction", "along") else "")

    def _broadcast(self, p: Term, t: Term, seen: tuple[Shape | None, ...]) -> bool:
        assert p.shape is not None and t.shape is not None
        loose = [a.broadcasts for a in p.args]
        if any(loose):
            return p.broadcasts is not None or self._tables(p, t, seen, loose)
        if all(s is None or s == t.shape for s in seen) and all(
            s is None or s == p.shape for s in p.seen
        ):
            return True
        groups = align(p.shape, t.shape, self._dims)
        assert groups is not None
        for i, (want, have) in enumerate(zip(p.seen, seen, strict=True)):
            if want is None or have is None:
                if (want is None) != (have is None) and not self._is_number_for(p.args[i], have):
                    return self._fail("op", p.args[i], t.args[i])
                continue
            wanted, found = broadcast_axes(want, p.shape), broadcast_axes(have, t.shape)
            for axis, group in enumerate(groups):
                if any(found[d] != wanted[axis] for d in group):
                    return self._fail(
                        "broadcast", p, t, actual=have, what=f"operand {i + 1}", shape=want
                    )
        return True

    def _tables(
        self,
        p: Term,
        t: Term,
        seen: tuple[Shape | None, ...],
        loose: list[Term | None],
    ) -> bool:
        """An operation with inputs that broadcast, along any of the leading dimensions."""
        assert p.shape is not None and t.shape is not None
        groups = align(p.shape, t.shape, self._dims)
        assert groups is not None
        inner = len(p.shape) - 1
        lead = len(t.shape) - inner
        apart = all(d < lead for d in groups[0])
        leading: dict[Term | None, Shape] = {None: t.shape[:lead]}
        for table, want, have in zip(loose, p.seen, seen, strict=True):
            if want is None or have is None:
                return want is have or self._fail("shape", p, t, want, have)
            wanted, found = broadcast_axes(want, p.shape), broadcast_axes(have, t.shape)
            for axis, group in enumerate(groups):
                if table is None or axis > 0:
                    apart = apart and all(found[d] == wanted[axis] for d in group)
            if table is not None:
                leading[table] = have[:-inner]
            if not apart:
                return self._fail("broadcast", p, t, actual=have, shape=want)
        for key, sizes in leading.items():
            known = self._leading.setdefault(key, sizes)
            if len(known) != len(sizes) or not all(map(same, known, sizes)):
                return self._fail("broadcast", p, t, known, sizes)
        return True

    @staticmethod
    def _is_number_for(pattern: Term, have: Shape | None) -> bool:
        return pattern.is_const and have == ()

    def _axes(self, p: Term, t: Term, seen: tuple[Shape | None, ...], kind: str) -> bool:
        for i, (want, have) in enumerate(zip(p.seen, seen, strict=True)):
            which = f"operand {i + 1}" if len(seen) > 1 else ""
            if want is None or have is None:
                if want is not have:
                    return self._fail("shape", p, t, want, have, which)
                continue
            if kind == "exact":
                if not self._same_dims(want, have):
                    return self._fail("shape", p, t, actual=have, what=which, shape=want)
                continue
            groups = align(want, have, self._dims)
            if groups is None:
                if kind == "reduction" and p.param("dim") != t.param("dim"):
                    return self._fail("dim", p, t, p.param("dim"), t.param("dim"))
                return self._fail("shape", p, t, actual=have, what=which, shape=want)
            of_one_rank = p.op != "cat" and len(want) == len(p.seen[0] or ())
            if of_one_rank and not self._along(p, t, have, groups, kind):
                return False
        return p.op != "cat" or self._concatenated(p, t)

    def _concatenated(self, p: Term, t: Term) -> bool:
        """Whether both are along the same dimension of their results; a part may be 1 wide."""
        assert p.shape is not None and t.shape is not None
        groups = align(p.shape, t.shape, self._dims)
        if groups is None:
            return self._fail("shape", p, t, actual=t.shape, shape=p.shape)
        return self._along(p, t, t.shape, groups, "along")

    def _same_dims(self, want: Shape, have: Shape) -> bool:
        """Whether each dimension is the one at its place, for operations that know them apart.

        Equal rows are not enough for them: ``[1, K]`` has those of ``[K, 1]``.
        """
        return len(want) == len(have) and all(
            align((w,), (h,), self._dims) is not None for w, h in zip(want, have, strict=True)
        )

    def _along(
        self, p: Term, t: Term, have: Shape, groups: list[tuple[int, ...]], kind: str
    ) -> bool:
        """Whether an operation along a dimension has the one that the pattern's stands for."""
        want_dim, found_dim = p.param("dim"), t.param("dim")
        dims = want_dim if isinstance(want_dim, tuple) else (want_dim,)
        found = found_dim if isinstance(found_dim, tuple) else (found_dim,)
        wanted = {d for i in dims for d in groups[i] if have[d] != 1}
        if wanted != {d for d in found if have[d] != 1}:
            return self._fail("dim", p, t, sorted(wanted), list(found))
        if kind == "along" and len(wanted) != 1:
            return self._fail("dim", p, t, dims, found)
        return True

    def _params(self, p: Term, t: Term, skip: str) -> bool:
        if p.params == t.params:
            return True
        found = dict(t.params)
        for name, want in p.params:
            if name == skip:
                continue
            if name not in found:
                return self._fail("keyword", p, t, want, "nothing", name)
            if not self._value(want, found[name]):
                numbers = _is_number(want) and _is_number(found[name])
                is_default = name in (defaults := _defaults(t)) and defaults[name] == want
                code = "literal" if numbers and not is_default else "keyword"
                return self._fail(code, p, t, want, found[name], name)
        for name in found.keys() - {k for k, _ in p.params}:
            default = _defaults(t).get(name)
            return self._fail(
                "keyword", p, t, "nothing" if default is None else default, found[name], name
            )
        return True

    # -- numbers -------------------------------------------------------------------------------

    def _number(self, p: Term, t: Term, user: Term) -> bool:
        """Match a literal operand; a tensor that holds one number is known only at run time."""
        want = p.value
        if t.is_const:
            if self._value(want, t.value):
                return True
            bound = self._numbers.get(want.name, want) if isinstance(want, Variable) else want
            return self._fail("literal", p, t, bound, t.value, user=user)
        want = "a number" if isinstance(want, Variable) else want
        return self._fail("scalar" if t.shape == () else "op", p, t, want, t, user=user)

    def _value(self, want: Any, have: Any) -> bool:
        if isinstance(want, Variable):
            if not _is_number(have):
                return False
            bound = self._numbers.setdefault(want.name, have)
            return self._equal(bound, have)
        if isinstance(want, tuple):
            return (
                isinstance(have, tuple)
                and len(want) == len(have)
                and all(self._value(w, h) for w, h in zip(want, have, strict=True))
            )
        if isinstance(want, sympy.Expr):
            size = _as_size(have)
            return size is not None and align((want,), (size,), self._dims) is not None
        if _is_number(want) and _is_number(have):
            return self._equal(want, have)
        return type(want) is type(have) and bool(want == have)

    def _equal(self, a: Any, b: Any) -> bool:
        """Equal, also after rounding to float32, in which graphs keep some literals."""
        if isinstance(a, sympy.Expr) or isinstance(b, sympy.Expr):
            return same(a, b)
        if a == b or (a != a and b != b):
            return True
        if self._exact_numbers or not (isinstance(a, float) or isinstance(b, float)):
            return False
        return bool(torch.tensor(a, dtype=torch.float32) == torch.tensor(b, dtype=torch.float32))

    def _known(self, shape: Shape) -> Shape:
        """A pattern's shape with the sizes that are bound already."""
        return tuple(
            size_of(s.xreplace({x: self._dims.get(x.name, x) for x in s.free_symbols}))
            if not isinstance(s, int)
            else s
            for s in shape
        )


def commutes(p: Term) -> bool:
    """Whether the operands may change places: not where one of them has a factor."""
    return p.op in _COMMUTES and len(p.args) == 2 and all(v in (None, 1) for _, v in p.params)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, sympy.Expr)) and not isinstance(value, bool)


def _as_size(value: Any) -> Size | None:
    """A number as a size; ``None`` where it is none, such as half a row."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if _is_number(value) else None


def _defaults(t: Term) -> dict[str, Any]:
    """What the arguments of the call that computes ``t`` have where they are left out."""
    schema = getattr(t.owners[0].target, "_schema", None) if t.owners else None
    if schema is None:
        return {}
    return {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
