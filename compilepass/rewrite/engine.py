"""Apply rules to a graph and say what was found and what was nearly found.

    engine = Engine(decompositions)
    results = engine.apply(graph, rules)

The graph's canonical terms are built once per :meth:`Engine.session` and kept up to date by the
edits, so that many rules share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ..reporting.records import NearMiss
from .canonical import Canonical
from .emit import Emitter
from .expand import KernelExpander
from .match import Unifier
from .near_miss import describe_failure, describe_reject
from .record import Decompositions
from .reject import Reject
from .rule import Pattern, Rule
from .site import Mutations, find_site
from .source import source_of
from .term import Term

__all__ = ["Engine", "Rewritten", "RuleResult", "Session"]


@dataclass(frozen=True)
class Rewritten:
    """One site that was rewritten: the node that stands there now, and the model's source lines."""

    node: str
    sources: tuple[str, ...]


@dataclass
class RuleResult:
    """What one rule did: its sites, and the best near miss of those that it did not take."""

    rule: Rule
    sites: list[Rewritten] = field(default_factory=list)
    near_miss: NearMiss | None = None
    refused: int = 0

    @property
    def count(self) -> int:
        return len(self.sites)


class Engine:
    """Traces patterns with ``decompositions`` (those of the compiler in use), each once per dtype."""

    def __init__(self, decompositions: Decompositions) -> None:
        self._decompositions = decompositions
        self._expand = KernelExpander(decompositions)
        self._patterns: dict[tuple[Rule, torch.dtype], Pattern] = {}

    def pattern(self, rule: Rule, dtype: torch.dtype) -> Pattern:
        """The rule's pattern for ``dtype``; raises :class:`PatternError` if it cannot be traced."""
        key = (rule, dtype)
        if key not in self._patterns:
            self._patterns[key] = Pattern.of(rule, dtype, self._decompositions, None)
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
            for anchor in [t for t in self.canonical.by_op.get(pattern.root.op, ())]:
                if anchor.dtype == pattern.root.dtype and anchor.op == pattern.root.op:
                    self._try(pattern, anchor, result)
        return result

    def _dtypes(self, rule: Rule) -> list[torch.dtype]:
        """The rule's dtypes that occur in the graph, so that only those patterns are traced."""
        if not any(spec.dtype is None for spec in rule.inputs.values()):  # type: ignore[union-attr]
            return list(rule.dtypes[:1])
        present = {
            t.dtype for op in ("leaf", *self.canonical.by_op) for t in self.canonical.by_op.get(op, ())
        }
        return [d for d in rule.dtypes if d in present]

    def _try(self, pattern: Pattern, anchor: Term, result: RuleResult) -> None:
        if any(owner._erased for owner in anchor.owners):
            return
        unifier = Unifier()
        bound = unifier.match(pattern.root, anchor)
        if bound is None:
            self._missed(pattern, result, lambda: describe_failure(pattern, unifier.failure))
            return
        site = find_site(pattern, bound, self.canonical, self._mutations)
        if isinstance(site, Reject):
            if site.code != "partial_kernel":
                result.refused += 1
                self._missed(pattern, result, lambda: describe_reject(pattern, site))
            return
        sources = dict.fromkeys(filter(None, (source_of(n) for n in site.covered)))
        made = self._emitter.rewrite(site)
        if made is None:
            return
        if isinstance(made, Reject):
            refusal = made
            result.refused += 1
            self._missed(pattern, result, lambda: describe_reject(pattern, refusal))
            return
        result.sites.append(Rewritten(_kernel_node(made), tuple(sources)))

    def _missed(self, pattern: Pattern, result: RuleResult, describe: Any) -> None:
        """Keep the near miss that got furthest; the sentences are made for that one alone."""
        near = describe()
        if near is None:
            return
        if result.near_miss is None or near.matched > result.near_miss.matched:
            result.near_miss = near


def _kernel_node(made: list[Node]) -> str:
    views = {torch.ops.aten.reshape.default}
    named = [n for n in made if n.target not in views]
    return (named or made)[0].name if made else ""
