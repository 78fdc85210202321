"""The report: what ran, what matched, what nearly matched and why not.

It is plain data: it survives a cache hit as JSON, and every view (text, JSON) is made from the
same records.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from .notes import Note
from .records import GraphRecord, MatchRecord, NearMiss, OpRecord, PassRecord, RuleRecord

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """One compiled model; its graphs are summed. ``from_cache``: no pass ran this time."""

    graphs: tuple[GraphRecord, ...] = ()
    ops: tuple[OpRecord, ...] = ()
    notes: tuple[Note, ...] = ()
    config: str = ""
    from_cache: bool = False
    default_config: bool = False  # no config was given or active

    @property
    def matches(self) -> dict[str, int]:
        """Changes per pass that ran in any graph, if only in part, in the order of the plan."""
        ran = {p.name for g in self.graphs for p in g.passes if p.status == "ran" or p.changes}
        return {p.name: p.changes for p in self.passes if p.name in ran}

    @property
    def rules(self) -> dict[str, int]:
        """Matches per rule, named ``pass: rule (file:line)``."""
        counts: Counter[str] = Counter()
        for graph in self.graphs:
            for p in graph.passes:
                for rule in p.rules:
                    counts[f"{p.name}: {rule.rule}"] += len(rule.sites)
        return dict(counts)

    @property
    def sites(self) -> tuple[tuple[str, str, MatchRecord], ...]:
        """Every rewritten site as (pass, rule, match)."""
        return tuple(
            (p.name, r.rule, m)
            for g in self.graphs
            for p in g.passes
            for r in p.rules
            for m in r.sites
        )

    @property
    def near_misses(self) -> tuple[NearMiss, ...]:
        """The best near miss of each rule, those that got furthest first."""
        best: dict[tuple[str, str], NearMiss] = {}
        for graph in self.graphs:
            for p in graph.passes:
                for rule in p.rules:
                    near = rule.near_miss
                    if near is None:
                        continue
                    key = (p.name, rule.rule)
                    if key not in best or best[key].matched < near.matched:
                        best[key] = dataclasses.replace(near, pass_name=p.name)
        return tuple(sorted(best.values(), key=lambda n: -n.matched / max(n.wanted, 1)))

    @property
    def passes(self) -> tuple[PassRecord, ...]:
        """The passes in plan order, summed over the graphs; the worst status wins."""
        order = ("failed", "ran", "skipped", "disabled")
        summed: dict[str, PassRecord] = {}
        for graph in self.graphs:
            for p in graph.passes:
                known = summed.get(p.name)
                if known is None:
                    summed[p.name] = dataclasses.replace(p, rules=())
                    continue
                worst = min(known, p, key=lambda x: order.index(x.status))
                summed[p.name] = dataclasses.replace(
                    worst, changes=known.changes + p.changes, ms=known.ms + p.ms, rules=()
                )
        return tuple(summed.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "matches": self.matches,
            "rules": self.rules,
            "from_cache": self.from_cache,
            "near_misses": [dataclasses.asdict(n) for n in self.near_misses],
            "graphs": [dataclasses.asdict(g) for g in self.graphs],
            "ops": [dataclasses.asdict(o) for o in self.ops],
            "notes": [dataclasses.asdict(n) for n in self.notes],
            "config": self.config,
            "default_config": self.default_config,
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The whole report as JSON; :meth:`from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Report:
        data = json.loads(text)
        return cls(
            graphs=tuple(_graph(g) for g in data["graphs"]),
            ops=tuple(OpRecord(**o) for o in data["ops"]),
            notes=tuple(Note(**n) for n in data["notes"]),
            config=data["config"],
            from_cache=data["from_cache"],
            default_config=data["default_config"],
        )

    def __str__(self) -> str:
        from .text import plain, render

        return plain(*render(self))


def _graph(data: dict[str, Any]) -> GraphRecord:
    return GraphRecord(**{**data, "passes": tuple(_pass(p) for p in data["passes"])})


def _pass(data: dict[str, Any]) -> PassRecord:
    return PassRecord(**{**data, "rules": tuple(_rule(r) for r in data["rules"])})


def _rule(data: dict[str, Any]) -> RuleRecord:
    near = data["near_miss"]
    if near is not None:
        near = NearMiss(**{**near, "equivalences": tuple(near["equivalences"])})
    sites = tuple(MatchRecord(m["node"], tuple(m["sources"])) for m in data["sites"])
    return RuleRecord(**{**data, "sites": sites, "near_miss": near})
