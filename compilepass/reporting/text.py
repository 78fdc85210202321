"""The report for a terminal, as parts that rich prints."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .records import NearMiss
    from .report import Report

__all__ = ["plain", "render"]

_SHOWN = 3  # source lines per rule


def plain(*parts: RenderableType, width: int = 100) -> str:
    """What rich would print, as text without colours."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None)
    for part in parts:
        console.print(part)
    return file.getvalue().rstrip()


def render(report: Report) -> Iterator[RenderableType]:
    """Summary, ops, passes, matches and near misses, in that order; empty parts are left out."""
    total = sum(report.matches.values())
    cached = ", from the cache" if report.from_cache else ""
    graphs = len(report.graphs)
    yield f"[bold]{_plural(total, 'change')} in {_plural(graphs, 'graph')}{cached}[/bold]"
    if report.default_config:
        yield "No configuration was given or active: the default one applied."
    if report.ops:
        yield _ops(report)
    if report.passes:
        yield _passes(report)
    if report.sites:
        yield _matches(report)
    if report.near_misses:
        yield "[bold]Nearly matched[/bold]"
        for first, *others in _same_place(report.near_misses):
            yield escape(str(first))
            if others:
                yield escape(f"  also: {', '.join(n.rule for n in others)}")
    for note in report.notes:
        yield f"[yellow]note[/yellow] {escape(note.source)}: {escape(note.message)}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _same_place(near_misses: Iterable[NearMiss]) -> list[list[NearMiss]]:
    """Near misses of one pass at one node together, the one that got furthest first."""
    groups: dict[tuple[str, str], list[NearMiss]] = {}
    for near in near_misses:
        groups.setdefault((near.pass_name, near.blocker or near.rule), []).append(near)
    return list(groups.values())


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        right = column in ("count", "of", "changes", "ms")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def _ops(report: Report) -> Table:
    table = _table("Ops", "op", "state", "count", "runs", "why")
    for op in report.ops:
        table.add_row(op.name, op.state, str(op.count), escape(op.implementation), escape(op.why))
    return table


def _passes(report: Report) -> Table:
    table = _table("Passes", "pass", "status", "changes", "ms", "reason")
    for p in report.passes:
        ran = p.status == "ran"
        table.add_row(
            p.name,
            p.status,
            str(p.changes) if ran else "",
            f"{p.ms:.1f}" if ran else "",
            escape(p.reason),
        )
    return table


def _matches(report: Report) -> Table:
    table = _table("Matches", "pass", "rule", "count", "of", "at")
    places_of = _candidates(report)
    for (pass_, rule), places in _grouped(report).items():
        lines = [f"{n} × {place}" if n > 1 else place for place, n in places.most_common(_SHOWN)]
        if len(places) > _SHOWN:
            lines.append(f"… and {len(places) - _SHOWN} other lines")
        total = sum(places.values())
        of = places_of.get((pass_, rule), 0)
        table.add_row(
            pass_, escape(rule), str(total), str(max(of, total)), escape("\n".join(lines))
        )
    return table


def _candidates(report: Report) -> dict[tuple[str, str], int]:
    """In how many places each rule might have matched, by pass and rule."""
    counts: Counter[tuple[str, str]] = Counter()
    for graph in report.graphs:
        for p in graph.passes:
            for rule in p.rules:
                counts[p.name, rule.rule] += rule.candidates
    return counts


def _grouped(report: Report) -> dict[tuple[str, str], Counter[str]]:
    """How often each source line was rewritten, by pass and rule."""
    groups: dict[tuple[str, str], Counter[str]] = {}
    for pass_, rule, match in report.sites:
        place = match.sources[0] if match.sources else match.node
        groups.setdefault((pass_, rule), Counter())[place] += 1
    return groups
