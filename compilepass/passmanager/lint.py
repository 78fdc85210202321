"""Find rules that can never fire because of a rule before them.

The pattern of each rule is written out as a graph of its own. A rule that runs earlier is applied
to it; the later one must then still match, as it does where the earlier one's kernel is read as
its native form.

    for finding in lint_rules(rules, engine):
        print(finding)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph

from ..rewrite import Engine, Rule

__all__ = ["Finding", "lint_rules"]


@dataclass(frozen=True)
class Finding:
    """``rule`` cannot fire: a wider rule shadows it, or a narrower one starves it (``kind``)."""

    kind: str
    rule: str
    by: str

    def __str__(self) -> str:
        why = {
            "shadowed": "the other one runs first and takes all that this one would match",
            "starved": "the other one runs first, and what it puts there is not read as before",
        }
        return f"{self.rule} is {self.kind} by {self.by}: {why[self.kind]}"


def lint_rules(rules: Sequence[Rule], engine: Engine) -> list[Finding]:
    """What is wrong with the order of ``rules``, as they would be applied to one graph.

    ``shadowed``: an earlier rule takes all of a later one's pattern. ``starved``: it takes a part,
    and the later one does not match the rest. Kernels count as available. A rule that does not
    match its own pattern (its check refuses the example's sizes) is left out.
    """
    found: dict[Finding, None] = {}
    for i, later in enumerate(rules):
        for dtype in later.variants:
            found.update(dict.fromkeys(_about(later, rules[:i], dtype, engine)))
    return list(found)


def _about(
    later: Rule, earlier: Sequence[Rule], dtype: torch.dtype, engine: Engine
) -> Iterator[Finding]:
    if not _applied(engine, engine.example(later, dtype), later):
        return
    for rule in earlier:
        graph = engine.example(later, dtype)
        old = {n for n in graph.nodes if n.op == "call_function"}
        if not _applied(engine, graph, rule) or _applied(engine, graph, later):
            continue
        left = old & set(graph.nodes)
        yield Finding("starved" if left else "shadowed", str(later), str(rule))


def _applied(engine: Engine, graph: Graph, rule: Rule) -> bool:
    """Whether ``rule`` matches ``graph``, which it changes then, or has been applied to it."""
    result = engine.session(graph, any_kernel=True).apply(rule)
    return result.count > 0 or result.is_done
