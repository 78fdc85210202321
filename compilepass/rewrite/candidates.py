"""Find where a pattern nearly stands: from its rarest operation downwards, then upwards.

Matching starts at the pattern's last operation. Where the model ends in another way that operation
is not there, and nothing would be said about the rest. So the pattern's *signature*, its operation
that is rarest in the graph, is matched as well: with all that it is computed from, over one place
that differs, and then with what is computed from it, as far as it goes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch.fx import Node

from ..kernels import find
from .arguments import Source
from .canonical import Canonical
from .match import Failure, Unifier, commutes
from .rule import Pattern, below
from .term import Term

__all__ = ["Candidates"]

#: arithmetic that is everywhere, and may well be what a candidate lacks
_COMMON = frozenset(["add", "sub", "mul", "div", "neg", "cast", "slice", "reciprocal"])


#: how far down a value is compared with the pattern before the search goes up from it
_DEPTH = 4


class Candidates:
    """Where ``pattern`` may stand in a graph.

    A search (:meth:`anchors`) starts at the operation that the graph has the fewest of, if it has
    all operations and dtypes of the pattern.

    What is told of a pattern that does not match (:meth:`misses`) starts at its *signatures*. There
    are two where several operations are equally rare: the one nearest to the output and the one
    nearest to the inputs, so that a difference between them is seen from both sides. ``found`` are
    the values of the first. They are looked for when they are asked for; which operations are rare
    is what it was in the beginning.
    """

    def __init__(self, pattern: Pattern, canonical: Canonical) -> None:
        self.pattern = pattern
        self.has_site = False  # whether a match was rewritten
        self._canonical = canonical
        self._counts = {t.op: canonical.count(t.op) for t in pattern.operations}

    def anchors(self) -> Iterator[Term]:
        """The values that the pattern's root may stand for; the graph may change meanwhile."""
        pattern, canonical = self.pattern, self._canonical
        dtypes = canonical.calls.dtypes
        counts = [self._counts[t.op] for t in pattern.operations]
        if not all(counts) or any(t.dtype not in dtypes for t in pattern.traced.inputs.values()):
            return
        fewest = len(counts) - 1 - counts[::-1].index(min(counts))  # the last, if there are several
        start = pattern.operations[fewest]
        self._read_spellings()
        path = pattern.path_from(start)
        for value in canonical.each_value(start.op):
            if value.dtype != start.dtype or not value.is_there or not _may_be(start, value):
                continue
            found = [value]
            for step in path:
                found = [
                    user
                    for value in found
                    for user, _ in canonical.users(value, step.op)
                    if user.dtype == step.dtype
                ]
            yield from found

    @property
    def signatures(self) -> tuple[Term, ...]:
        return self._chosen[0]

    @property
    def found(self) -> tuple[Term, ...]:
        return self._chosen[1]

    @functools.cached_property
    def _chosen(self) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        """The rarest operations that have values, with those of the first.

        Where all values of the rarest ones went into sites, there are no more candidates.
        """
        pattern, canonical = self.pattern, self._canonical
        often = Counter(t.op for t in pattern.operations)
        rank = {t: (often[t.op], self._counts[t.op]) for t in pattern.operations}
        there = [t for t in pattern.operations if rank[t][1]]
        for common in (False, True):
            left = [t for t in there if (t.op in _COMMON) is common]
            if len(left) > 1 and pattern.root in left:
                left.remove(pattern.root)  # each of those is tried anyway
            while left:
                least = min(rank[t] for t in left)
                rarest = [t for t in left if rank[t] == least]
                found = _values(rarest[-1], canonical)
                if found or self.has_site:
                    return tuple(dict.fromkeys((rarest[-1], rarest[0]))), found
                left.remove(rarest[-1])
        return (), ()

    def _read_spellings(self) -> None:
        for op in {t.op for t in self.pattern.operations}:
            self._canonical.read_spellings(op)

    def misses(self, own: set[Node]) -> Iterator[Failure]:
        """How far the pattern goes at each candidate that still is there, one per source line.

        Values of ``own``, what the rule wrote or would write, are none.
        """
        canonical = self._canonical
        told: set[object] = set()
        self._read_spellings()
        for i, signature in enumerate(self.signatures):
            for term in _values(signature, canonical) if i else self.found:
                if any(n._erased or n in own for n in term.owners):
                    continue
                line = term.owners[0].meta.get("stack_trace") if term.owners else None
                key = (signature, line, term.shape)
                if line is not None and key in told:
                    continue
                told.add(key)
                attempt = _Attempt(self.pattern, canonical)
                failure = attempt.at(signature, term)
                if failure is not None and not attempt.is_one_kernel:
                    yield failure


def _values(term: Term, canonical: Canonical) -> tuple[Term, ...]:
    return tuple([t for t in canonical.values(term.op) if t.dtype == term.dtype])


def _may_be(p: Term, t: Term, depth: int = _DEPTH) -> bool:
    """Whether a value may be the pattern's, as far down as the order of operands is settled."""
    if p.op in ("input", "const"):
        return True
    if p.op != t.op or p.dtype != t.dtype or len(p.args) != len(t.args):
        return False
    if not depth or commutes(p):
        return True
    return all(_may_be(want, have, depth - 1) for want, have in zip(p.args, t.args, strict=True))


class _Attempt:
    """One candidate, matched as far as it goes."""

    def __init__(self, pattern: Pattern, canonical: Canonical) -> None:
        self._pattern, self._canonical = pattern, canonical
        self._unifier = Unifier()
        self._skipped: set[Term] = set()

    @property
    def is_one_kernel(self) -> bool:
        """Whether all that matched is a part of one kernel call: another rule has been here."""
        bound = self._unifier.terms.items()
        terms = [t for p, t in bound if p.op not in ("input", "const") and p not in self._skipped]
        owners = {node for t in terms for node in t.owners}
        return len(terms) > 1 and len(owners) == 1 and find(owners.pop().target) is not None

    def at(self, signature: Term, found: Term) -> Failure | None:
        """The first place that differs, with the number of operations that fit around it."""
        gap = None
        if not self._unifier.extend(signature, found):
            gap = self._unifier.failure
            assert gap is not None
            self._unifier = Unifier(gap=gap.pattern)
            self._skipped = below(gap.pattern)
            if not self._unifier.extend(signature, found):
                return gap
        failure = self._upwards()
        first = gap or failure
        if first is None:
            return None
        matched = min(self._unifier.matched, self._pattern.wanted - 1)
        bound = (*first.bound, *self._unifier.terms.values())
        return replace(first, matched=matched, bound=bound)

    def _upwards(self) -> Failure | None:
        bound = self._unifier.terms
        for p in self._pattern.operations:
            if p in bound or p in self._skipped:
                continue
            source = next(
                (a for a in p.args if a in bound and a.op not in ("input", "const")), None
            )
            if source is None:
                continue
            failure = self._step(p, bound[source])
            if failure is not None:
                return failure
        return None

    def _step(self, p: Term, source: Term) -> Failure | None:
        """Bind ``p`` to one of the values computed from ``source``, or say why none fits."""
        users = self._canonical.users(source)
        best: Failure | None = None
        for user, _ in users:
            if user.op == p.op and user.dtype == p.dtype:
                if self._unifier.extend(p, user):
                    return None
                failure = self._unifier.failure
                if failure is not None and (best is None or failure.matched > best.matched):
                    best = failure
        return best or self._no_user(p, source, users)

    def _no_user(self, p: Term, source: Term, users: list[tuple[Term, Source]]) -> Failure:
        matched = set(self._unifier.terms.values())
        others = [(t, n) for t, n in users if t not in matched]
        for _, node in others:
            result = self._canonical.term(node)
            if result is not None and result.op == p.op and result.dtype != p.dtype:
                return Failure("dtype", p, result, p.dtype, result.dtype)
        if others:
            return Failure("op", p, others[0][0], p.op, others[0][0].op)
        return Failure("op", p, source, p.op, "no further operation")
