"""Apply rules to a graph and say what was found and what was nearly found.

    engine = Engine(decompositions)
    results = engine.apply(graph, rules)

The graph's canonical terms are built once per :meth:`Engine.session` and kept up to date by the
edits, so that many rules share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.fx import Graph, Node

from ..reporting.records import NearMiss
from .canonical import Canonical
from .emit import Emitter
from .expand import KernelExpander
from .match import Bindings, Unifier
from .near_miss import describe_failure, describe_reject
from .record import Decompositions
from .reject import Reject
from .rule import Pattern, Rule
from .site import Mutations, Site, find_site
from .source import source_of
from .term import Term

#: below this share of matched operations a candidate is another thing, not a near miss
_NEAR = 0.5

__all__ = ["Engine", "Rewritten", "RuleResult", "Session"]


@dataclass(frozen=True)
class Rewritten:
    """One site that was rewritten: the node that stands there now, and the model's source lines."""

    node: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class _Missed:
    """A candidate that was not taken; the text is made only if it is the best one in the end."""

    anchor: Term
    matched: int
    describe: Callable[[], NearMiss]


@dataclass
class RuleResult:
    """What one rule did: its sites, and the candidates that it did not take."""

    rule: Rule
    sites: list[Rewritten] = field(default_factory=list)
    refused: int = 0
    _missed: list[_Missed] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.sites)

    @property
    def near_miss(self) -> NearMiss | None:
        """The candidate that got furthest, of those that no other rule has taken since."""
        left = [m for m in self._missed if not any(n._erased for n in m.anchor.owners)]
        best = max(left, key=lambda m: m.matched, default=None)
        return best.describe() if best is not None else None


class Engine:
    """Traces patterns with the compiler's ``decompositions``, each once per dtype."""

    def __init__(self, decompositions: Decompositions) -> None:
        self._decompositions = decompositions
        self._expand = KernelExpander(decompositions)
        self._patterns: dict[tuple[Rule, torch.dtype], Pattern] = {}

    def pattern(self, rule: Rule, dtype: torch.dtype) -> Pattern:
        """The rule's pattern for ``dtype``; raises :class:`PatternError` if it cannot be traced."""
        key = (rule, dtype)
        if key not in self._patterns:
            self._patterns[key] = Pattern.of(rule, dtype, self._decompositions)
        return self._patterns[key]

    def session(self, graph: Graph) -> Session:
        return Session(self, graph)

    def apply(self, graph: Graph, rules: Sequence[Rule]) -> list[RuleResult]:
        """Apply ``rules`` in order to ``graph``, in place."""
        session = self.session(graph)
        return [session.apply(rule) for rule in rules]


class Session:
    """The engine at work on one graph; nobody else may edit the graph meanwhile."""

    def __init__(self, engine: Engine, graph: Graph) -> None:
        self._engine = engine
        self.graph = graph
        self.canonical = Canonical(engine._expand)
        self.canonical.add_graph(graph)
        self._mutations = Mutations(graph)
        self._emitter = Emitter(graph, self.canonical)

    def apply(self, rule: Rule) -> RuleResult:
        """Rewrite every site of ``rule``, in graph order."""
        result = RuleResult(rule)
        for dtype in self._dtypes(rule):
            pattern = self._engine.pattern(rule, dtype)
            for anchor in list(self.canonical.by_op.get(pattern.root.op, ())):
                if anchor.dtype == pattern.root.dtype and anchor.op == pattern.root.op:
                    self._try(pattern, anchor, result)
        return result

    def _dtypes(self, rule: Rule) -> list[torch.dtype]:
        """The rule's dtypes that occur in the graph, so that only those patterns are traced."""
        if not any(spec.dtype is None for spec in rule.inputs.values()):  # type: ignore[union-attr]
            return list(rule.dtypes[:1])
        present = {
            t.dtype
            for op in ("leaf", *self.canonical.by_op)
            for t in self.canonical.by_op.get(op, ())
        }
        return [d for d in rule.dtypes if d in present]

    def _try(self, pattern: Pattern, anchor: Term, result: RuleResult) -> None:
        if any(owner._erased for owner in anchor.owners):
            return
        unifier = Unifier()
        bound = unifier.match(pattern.root, anchor)
        if bound is None:
            failure = unifier.failure
            if failure is not None and failure.matched >= _NEAR * pattern.wanted:
                miss = _Missed(anchor, failure.matched, partial(describe_failure, pattern, failure))
                result._missed.append(miss)
            return
        sources = _sources(bound)
        site = find_site(pattern, bound, self.canonical, self._mutations)
        made = self._emitter.rewrite(site) if isinstance(site, Site) else site
        if isinstance(made, Reject):
            if made.code == "partial_kernel":  # fused already, with something else
                return
            result.refused += 1
            miss = _Missed(anchor, pattern.wanted, partial(describe_reject, pattern, made))
            result._missed.append(miss)
        elif made is not None:
            result.sites.append(Rewritten(_kernel_node(made), sources))


def _sources(bound: Bindings) -> tuple[str, ...]:
    """The model's lines that a match covers, outputs first."""
    nodes = [n for p, t in bound.terms.items() if p.op not in ("input", "const") for n in t.owners]
    return tuple(dict.fromkeys(filter(None, map(source_of, nodes))))


def _kernel_node(made: list[Node]) -> str:
    views = {torch.ops.aten.reshape.default}
    named = [n for n in made if n.target not in views]
    return (named or made)[0].name if made else ""
