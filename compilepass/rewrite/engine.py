"""Apply rules to a graph and say what was found and what was nearly found.

    engine = Engine(decompositions)
    results = engine.apply(graph, rules)

The graph's canonical terms are built once per :meth:`Engine.session` and kept up to date by the
edits, so that many rules share them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ..errors import PatternError
from ..kernels import find
from ..reporting.records import NearMiss
from .candidates import Candidates
from .canonical import Canonical
from .emit import Emitter
from .example import example_graph
from .expand import KernelExpander
from .match import Failure, Unifier
from .near_miss import describe_failure, describe_reject
from .operations import op_name
from .record import Decompositions, Recording
from .region import Region
from .reject import DECLINED, Reject
from .rule import Pattern, Rule
from .site import Mutations, Site, find_site
from .source import innermost_line
from .term import Term

#: below this share of matched operations a candidate is another thing, not a near miss
_NEAR = 0.5

#: the refusal of what is fused already, into a kernel that computes more
_FUSED = "partial_kernel"

__all__ = ["Engine", "Rewritten", "RuleResult", "Session"]


@dataclass(frozen=True)
class Rewritten:
    """One site that was rewritten: the node that stands there now, and the model's source lines."""

    node: str
    sources: tuple[str, ...]
    place: Any = field(default=None, compare=False, repr=False)  # the node itself


@dataclass
class RuleResult:
    """What one rule did: its sites, and the candidates that it did not take.

    ``refusals`` counts the matches that were not rewritten by their code. ``error`` is why the
    pattern could not be traced.
    """

    rule: Rule
    sites: list[Rewritten] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    error: PatternError | None = None
    _canonical: Canonical | None = None
    _candidates: list[Candidates] = field(default_factory=list)
    _missed: list[_Missed] = field(default_factory=list)
    _fused: set[Node] = field(default_factory=set)  # calls that are what the rule would write
    _made: set[Node] = field(default_factory=set)

    @property
    def count(self) -> int:
        return len(self.sites)

    @property
    def is_done(self) -> bool:
        """Whether a match was there that is what the rule would write already."""
        return bool(self._fused)

    @property
    def declined(self) -> int:
        """Matches that no kernel takes."""
        return sum(self.refusals[code] for code in DECLINED)

    @property
    def refused(self) -> int:
        """Matches that would not be safe to rewrite, or that the rule itself refused."""
        return self.refusals.total() - self.declined - self.refusals[_FUSED]

    @property
    def wrong(self) -> str:
        """The first site whose replacement computes something else, or ``""``."""
        for m in self._missed:
            if isinstance(m.why, Reject) and m.why.code == "numerics":
                node = f" at {m.why.node.name}" if m.why.node is not None else ""
                message = m.why.message.removesuffix(".")
                return f"{message}{node}: {m.why.found}, allowed {m.why.expected}"
        return ""

    @property
    def candidates(self) -> int:
        """How many values the rarest operation of the pattern stands for, its sites included."""
        own = self._fused | self._made
        left = {t for c in self._candidates for t in c.found if own.isdisjoint(t.owners)}
        return len(self.sites) + len(left)

    @property
    def near_miss(self) -> NearMiss | None:
        """The candidate that got furthest, of those that no other rule has taken since."""
        if self._canonical is None:
            return None
        left = [m for m in self._missed if m.anchor is None or not m.anchor._erased]
        if not any(m.matched == m.pattern.wanted for m in left):  # a refused match is the best
            left = [*self._partial(), *left]
        best = max(left, key=lambda m: m.matched, default=None)
        return best.describe(self._canonical) if best is not None else None

    def _partial(self) -> Iterator[_Missed]:
        assert self._canonical is not None
        own = self._fused | self._made
        for candidates in self._candidates:
            pattern = candidates.pattern
            failures = (
                *candidates.misses(own),
                *self._from_the_end(pattern),
            )
            for failure in failures:
                if _is_near(failure, pattern):
                    yield _Missed(None, pattern, failure.matched, failure)

    def _from_the_end(self, pattern: Pattern) -> Iterator[Failure]:
        """How far the pattern goes at each value that has its last operation."""
        assert self._canonical is not None
        for anchor in self._canonical.values(pattern.root.op):
            if anchor.dtype != pattern.root.dtype or any(
                n in self._fused or n in self._made or find(n.target) is not None
                for n in anchor.owners
            ):
                continue
            unifier = Unifier(exact=pattern.dtype is torch.float64)
            if unifier.match(pattern.root, anchor) is None and unifier.failure is not None:
                yield unifier.failure


@dataclass(frozen=True)
class _Missed:
    """A candidate that was not taken; the text is made only if it is the best one in the end."""

    anchor: Node | None
    pattern: Pattern
    matched: int
    why: Failure | Reject

    def describe(self, canonical: Canonical) -> NearMiss:
        if isinstance(self.why, Reject):
            return describe_reject(self.pattern, self.why)
        return describe_failure(self.pattern, self.why, canonical)


class Engine:
    """Traces patterns with the compiler's ``decompositions``, each once per dtype."""

    def __init__(self, decompositions: Decompositions) -> None:
        self._decompositions = decompositions
        self._expand = KernelExpander(decompositions)
        self._patterns: dict[tuple[Rule, torch.dtype], Pattern] = {}
        self._recordings: dict[Any, Recording] = {}

    def pattern(self, rule: Rule, dtype: torch.dtype) -> Pattern:
        """The rule's pattern for ``dtype``; raises :class:`PatternError` if it cannot be traced."""
        key = (rule, dtype)
        if key not in self._patterns:
            self._patterns[key] = Pattern.of(rule, dtype, self._decompositions)
        return self._patterns[key]

    def session(self, graph: Graph, *, verify: bool = False, any_kernel: bool = False) -> Session:
        """A session on ``graph``.

        ``verify`` runs each kind of replacement against its original. ``any_kernel`` takes kernels
        that this machine does not have.
        """
        return Session(self, graph, verify=verify, any_kernel=any_kernel)

    def example(self, rule: Rule, dtype: torch.dtype) -> Graph:
        """The rule's pattern for ``dtype`` as a graph of its own."""
        return example_graph(rule, dtype, self._decompositions)

    def apply(self, graph: Graph, rules: Sequence[Rule]) -> list[RuleResult]:
        """Apply ``rules`` in order to ``graph``, in place."""
        session = self.session(graph)
        return [session.apply(rule) for rule in rules]


class Session:
    """The engine at work on one graph; nobody else may edit the graph meanwhile."""

    def __init__(
        self, engine: Engine, graph: Graph, *, verify: bool = False, any_kernel: bool = False
    ) -> None:
        self._engine = engine
        self.graph = graph
        self.canonical = Canonical(graph, engine._expand)
        self._mutations = Mutations(self.canonical.calls.mutable_calls())
        self._emitter = Emitter(
            graph,
            self.canonical,
            decompositions=engine._decompositions,
            recordings=engine._recordings,
            has_writes=bool(self._mutations),
            verify=verify,
            any_kernel=any_kernel,
        )

    def apply(self, rule: Rule, *, refusal: Reject | None = None) -> RuleResult:
        """Rewrite every site of ``rule``, in graph order; with ``refusal``, refuse it instead."""
        with torch._C.DisableTorchFunctionSubclass():  # fake tensors tell their shapes sooner
            return self._apply(rule, refusal)

    def _apply(self, rule: Rule, refusal: Reject | None) -> RuleResult:
        result = RuleResult(rule, _canonical=self.canonical)
        try:
            patterns = [self._engine.pattern(rule, dtype) for dtype in self._dtypes(rule)]
        except PatternError as error:
            result.error = error
            return result
        for pattern in patterns:
            candidates = Candidates(pattern, self.canonical)
            result._candidates.append(candidates)
            before = len(result.sites)
            waiting: list[Region] = []
            for region in self._regions(candidates, result):
                if not self._take(region, result, refusal):
                    waiting.append(region)
            self._take_together(waiting, result, refusal)
            candidates.has_site = len(result.sites) > before
        result.sites.sort(key=lambda site: site.place)
        return result

    def _dtypes(self, rule: Rule) -> list[torch.dtype]:
        """The rule's dtypes that occur in the graph, so that only those patterns are traced.

        The wider ones come last: their patterns are often parts of the others, between two casts.
        A rule of quantised operands has nothing to look for where no tensor is of their dtype.
        """
        if not rule.quantised <= self.canonical.calls.dtypes:
            return []
        if len(rule.variants) == 1:
            return list(rule.variants)
        present = [d for d in rule.variants if d in self.canonical.calls.dtypes]
        return sorted(present, key=lambda d: d.itemsize)

    def _regions(self, candidates: Candidates, result: RuleResult) -> Iterator[Region]:
        """The matches one by one, while the caller rewrites those that it was given.

        What the rule made is not looked at, so that a replacement may hold the pattern itself.
        """
        pattern, canonical = candidates.pattern, self.canonical
        tried: set[Term | Node] = set()
        # Places in kernels that are no sites whatever is around them: whether they match.
        settled: dict[Any, bool] = {}
        for anchor in candidates.anchors():
            if anchor in tried or anchor.node in tried or not anchor.is_there:
                continue
            tried.add(anchor)
            place = canonical.place_in_kernel(anchor)
            if place in settled:
                if settled[place]:
                    result._fused.update(anchor.owners)
                continue
            unifier = Unifier(exact=pattern.dtype is torch.float64)
            bound = unifier.match(pattern.root, anchor)
            if bound is None:
                if place is not None and unifier.stayed_inside(anchor.owners):
                    settled[place] = False
                continue
            first = Region.of(pattern, anchor, bound, canonical)
            if place is not None and first.is_inside_kernel:
                settled[place] = True
            tried.add(first.root)
            form = first.form
            others = canonical.calls.named(op_name(first.root.target)) if form is not None else []
            yield first
            for node in others:
                if node not in tried and node not in result._made and not node._erased:
                    assert form is not None
                    region = form.find(node)
                    if region is not None:
                        tried.add(node)
                        yield region

    def _take(
        self,
        region: Region,
        result: RuleResult,
        refusal: Reject | None,
        going: Collection[Node] | None = None,
    ) -> bool:
        """Rewrite one match or say why not; false if a value is needed outside of it.

        ``going`` are the nodes of all matches that share values with this one; with them known,
        that is a refusal like any other.
        """
        pattern, root = region.pattern, region.root
        sources = _sources(region)
        site = find_site(region, self.canonical, self._mutations, going or ())
        if going is None and isinstance(site, Reject) and site.code == "extra_user":
            return False
        made = self._rewrite(site, refusal) if isinstance(site, Site) else site
        if isinstance(made, Reject):
            made = made.at(root)
            result.refusals[made.code] += 1
            if made.code == _FUSED:
                result._fused.add(root)
                result._fused.update(region.covered)
            else:
                result._missed.append(_Missed(root, pattern, pattern.wanted, made))
        elif made is None:
            result._fused.update(region.covered)
        else:
            result._made.update(made)
            kernel = _kernel_node(made)
            result.sites.append(Rewritten(kernel.name if kernel else "", sources, kernel))
        return True

    def _take_together(
        self, waiting: list[Region], result: RuleResult, refusal: Reject | None
    ) -> None:
        """Rewrite the matches whose values are used outside, but only by one another.

        Two norms of one input with different weights share all but their last multiplication.
        """
        together = waiting
        while True:
            going = {n for region in together for n in region.covered}
            kept = [
                region
                for region in together
                if isinstance(find_site(region, self.canonical, self._mutations, going), Site)
            ]
            if len(kept) == len(together):
                break
            together = kept
        for region in waiting:
            if not any(n._erased for n in region.covered):
                self._take(region, result, refusal, going if region in together else ())

    def _rewrite(self, site: Site, refusal: Reject | None) -> list[Node] | Reject | None:
        return refusal.at(site.anchor) if refusal is not None else self._emitter.rewrite(site)


def _is_near(failure: Failure, pattern: Pattern) -> bool:
    """Whether this is an attempt at the pattern; the right operation used otherwise counts."""
    return failure.matched + (failure.code != "op") >= _NEAR * pattern.wanted


def _sources(region: Region) -> tuple[str, ...]:
    """The model's lines that a match covers, outputs first."""
    traces = dict.fromkeys([n.meta.get("stack_trace") for n in region.covered])
    return tuple(dict.fromkeys(filter(None, map(innermost_line, filter(None, traces)))))


def _kernel_node(made: list[Node]) -> Node | None:
    views = {torch.ops.aten.reshape.default}
    named = [n for n in made if n.target not in views]
    return (named or made)[0] if made else None
