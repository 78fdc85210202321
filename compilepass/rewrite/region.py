"""The nodes of a match, and the form by which equal ones are found without another search.

A deep model has the same few nodes again in each of its layers. Where one part of the graph was
matched, a part with the same operations, literals and wiring, on values of the same layout,
computes the same function; so it matches in the same way, and only what is around it has to be
checked again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .canonical import Canonical
from .contract import layout
from .match import Bindings
from .rule import Pattern
from .term import Shape, Size, Term, size_of

__all__ = ["Form", "Region"]

_LARGEST = 150  # nodes of a form; beyond that, views by the hundred, sites are searched one by one


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a graph that has the form of ``pattern``.

    ``root`` computes the output that all others lead to. ``free`` are casts of inputs, which may
    have other users. ``form`` is what the region has in common with equal ones, if there may be
    any. Where inputs broadcast, ``leading`` has the sizes that ``"..."`` stands for in each.
    """

    pattern: Pattern
    root: Node
    inputs: dict[str, Node | None]
    outputs: tuple[Node | None, ...]
    covered: dict[Node, None]
    free: frozenset[Node]
    dims: dict[str, Size]
    numbers: dict[str, Any]
    leading: dict[str, Shape]
    form: Form | None = None

    @classmethod
    def of(cls, pattern: Pattern, root: Term, bound: Bindings, canonical: Canonical) -> Region:
        traced, terms = pattern.traced, bound.terms
        region = cls(
            pattern,
            root.node or root.owners[0],
            {name: terms[term].node for name, term in traced.inputs.items()},
            tuple([terms[term].node for term in traced.outputs]),
            bound.covered,
            frozenset(filter(None, (terms[p].node for p in _free_casts(pattern)))),
            bound.dims,
            {**bound.numbers, **{n: bound.dims[f"${n}"] for n in pattern.rule.integers}},
            _leading(pattern, bound),
        )
        form = Form.of(region, canonical) if root.node is not None else None
        object.__setattr__(region, "form", form)
        return region


def _free_casts(pattern: Pattern) -> list[Term]:
    """Casts of an input: another user of one keeps it alive, and nothing is computed twice."""
    traced = pattern.traced
    return [
        p
        for p in traced.terms
        if p.op == "cast" and p.args[0].op == "input" and p not in traced.outputs
    ]


def _leading(pattern: Pattern, bound: Bindings) -> dict[str, Shape]:
    if not bound.leading:
        return {}
    return {
        name: bound.leading.get(term, bound.leading[None])
        for name, term in pattern.traced.inputs.items()
        if pattern.rule.is_open(name)
    }


class _Place(NamedTuple):
    """Stands for the node at a place of a form."""

    number: int


class _Call(NamedTuple):
    target: Any
    args: Any
    kwargs: Any


class Form:
    """The operations of a region and how they are wired, from its root downwards."""

    def __init__(self, region: Region, canonical: Canonical) -> None:
        self._region = region
        self._canonical = canonical
        self._inputs = set(region.inputs.values())
        self._steps: list[_Call | None] = []
        self._given: list[tuple[int, Any]] = []  # places outside, each with what must be there
        self._places: dict[Node, int] = {}

    @classmethod
    def of(cls, region: Region, canonical: Canonical) -> Form | None:
        """The form of ``region``; ``None`` where it has nodes that do not lead to its root."""
        form = cls(region, canonical)
        form._visit(region.root)
        wanted = (*region.covered, *filter(None, (*region.inputs.values(), *region.outputs)))
        is_whole = None not in form._inputs and all(n in form._places for n in wanted)
        is_whole = is_whole and len(form._places) < _LARGEST
        return form if is_whole else None

    def find(self, root: Node) -> Region | None:
        """The equal region that ends in ``root``, if there is one."""
        nodes: list[Any] = [None] * len(self._steps)
        if not self._fits(0, root, nodes):
            return None
        for place, kind in self._given:
            if _kind(nodes[place]) != kind:
                return None
        like, at = self._region, self._places

        def there(node: Node | None) -> Any:
            return None if node is None else nodes[at[node]]

        return Region(
            like.pattern,
            root,
            {name: there(node) for name, node in like.inputs.items()},
            tuple([there(node) for node in like.outputs]),
            {there(node): None for node in like.covered},
            frozenset([there(node) for node in like.free]),
            like.dims,
            like.numbers,
            like.leading,
            self,
        )

    def _visit(self, node: Node) -> _Place:
        if node in self._places:
            return _Place(self._places[node])
        place = self._places[node] = len(self._steps)
        self._steps.append(None)
        if (
            len(self._places) < _LARGEST
            and node not in self._inputs
            and (node in self._region.covered or self._canonical.is_transparent(node))
        ):
            step = _Call(node.target, self._template(node.args), self._template(node.kwargs))
            self._steps[place] = step
        else:
            self._given.append((place, _kind(node)))
        return _Place(place)

    def _template(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self._visit(value)
        if isinstance(value, (tuple, list)):
            return [self._template(v) for v in value]
        if isinstance(value, dict):
            return {k: self._template(v) for k, v in value.items()}
        return value

    def _fits(self, place: int, node: Node, nodes: list[Any]) -> bool:
        if nodes[place] is not None:
            return nodes[place] is node
        step = self._steps[place]
        nodes[place] = node
        if step is None:
            return True
        if node.target is not step.target:
            return False
        return self._same(step.args, node.args, nodes) and (
            not (step.kwargs or node.kwargs) or self._same(step.kwargs, node.kwargs, nodes)
        )

    def _same(self, want: Any, have: Any, nodes: list[Any]) -> bool:
        kind = type(want)
        if kind is _Place:
            return isinstance(have, Node) and self._fits(want.number, have, nodes)
        if kind is list:
            if not isinstance(have, (tuple, list)) or len(want) != len(have):
                return False
            return all(self._same(w, h, nodes) for w, h in zip(want, have, strict=True))
        if kind is dict:
            return (
                isinstance(have, dict)
                and want.keys() == have.keys()
                and all(self._same(w, have[k], nodes) for k, w in want.items())
            )
        return kind is type(have) and bool(want == have)


def _kind(node: Node) -> Any:
    """What must be equal of a value from outside: its layout, or itself if it is a number."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return layout(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return size_of(value) if isinstance(value, torch.SymInt) else value.node.expr
    return value if isinstance(value, (int, float)) else node
