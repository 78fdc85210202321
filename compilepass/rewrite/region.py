"""The nodes of a match, and the form by which equal ones are found without another search.

A deep model has the same few nodes again in each of its layers. Where one part of the graph was
matched, a part with the same operations, literals and wiring, on values of the same layout,
computes the same function; so it matches in the same way, and only what is around it has to be
checked again.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .canonical import Canonical
from .layout import layout
from .match import Bindings
from .rule import Pattern
from .term import Shape, Size, Term, same, size_of
from .trace import size_symbol

__all__ = ["Form", "Region"]

_LARGEST = 150  # nodes of a form; beyond that, views by the hundred, sites are searched one by one


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a graph that has the form of ``pattern``.

    ``root`` computes the output that all others lead to. ``free`` are casts and transpositions of
    inputs, which may have other users. ``form`` is what the region has in common with equal ones,
    if there may be any.
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

    @property
    def is_inside_kernel(self) -> bool:
        """Whether it is a part of one kernel call, with an input or output that exists inside."""
        if len(self.covered) > 1:
            return False
        inside = [
            n is None or (n.target is operator.getitem and n.args[0] in self.covered)
            for n in self.inputs.values()
        ]
        return any(inside) or not any(self.outputs)

    @classmethod
    def of(cls, pattern: Pattern, root: Term, bound: Bindings, canonical: Canonical) -> Region:
        traced, terms = pattern.traced, bound.terms
        region = cls(
            pattern,
            root.node or root.owners[0],
            {
                name: _as_used(pattern, name, bound, canonical, terms[term].node)
                for name, term in traced.inputs.items()
            },
            tuple([terms[term].node for term in traced.outputs]),
            bound.covered,
            frozenset(filter(None, (terms[p].node for p in _free(pattern)))),
            bound.dims,
            {**bound.numbers, **{n: bound.dims[f"${n}"] for n in pattern.rule.integers}},
            _leading(pattern, bound),
        )
        form = Form.of(region, canonical) if root.node is not None else None
        object.__setattr__(region, "form", form)
        return region


def _leading(pattern: Pattern, bound: Bindings) -> dict[str, Shape]:
    if not bound.leading:
        return {}
    return {
        name: bound.leading.get(term, bound.leading[None])
        for name, term in pattern.traced.inputs.items()
        if pattern.rule.is_open(name)
    }


def _as_used(
    pattern: Pattern, name: str, bound: Bindings, canonical: Canonical, node: Node | None
) -> Node | None:
    """The view of an input that the match reads, where how inputs broadcast decides on one.

    Sites that share a table share its view, which may be a copy.
    """
    lead = _leading(pattern, bound).get(name)
    if lead is None or node is None:
        return node
    dims = {size_symbol(n.removeprefix("$")): s for n, s in bound.dims.items()}
    rest = pattern.rule.specs(pattern.dtype)[name].shape[1:]
    wanted = (*lead, *(s if isinstance(s, int) else size_of(s.xreplace(dims)) for s in rest))
    covered = bound.covered
    todo = [node]
    while todo:
        view = todo.pop()
        shape = tuple(view.meta["val"].shape)
        fits = len(shape) == len(wanted) and all(
            same(size_of(a), b) for a, b in zip(shape, wanted, strict=True)
        )
        if fits and any(user in covered for user in view.users):
            return view
        through = (u for u in view.users if u not in covered and canonical.is_transparent(u))
        todo += [u for u in through if canonical.term(u) is canonical.term(node)]
    return node


def _free(pattern: Pattern) -> list[Term]:
    """Casts and transpositions of an input: another user of one keeps it alive.

    Nothing is computed twice. A weight that several layers share is an example.
    """
    traced = pattern.traced
    free: dict[Term, None] = {}
    for p in traced.terms:
        if p.op in ("cast", "permute") and p not in traced.outputs:
            source = p.args[0]
            if source.op == "input" or source in free:
                free[p] = None
    return list(free)


class _Place(NamedTuple):
    """Stands for the node at a place of a form."""

    number: int


class _Step(NamedTuple):
    """What the call at a place must be: the target, and its arguments by position.

    ``sources`` are the places of those that are nodes, ``literals`` the plain values, ``nested``
    the lists, which may hold nodes.
    """

    place: int
    target: Any
    arity: int
    sources: tuple[tuple[int, int], ...]
    literals: tuple[tuple[int, Any], ...]
    nested: tuple[tuple[int, Any], ...]
    kwargs: dict[str, Any]


class Form:
    """The operations of a region and how they are wired, from its root downwards."""

    def __init__(self, region: Region, canonical: Canonical) -> None:
        self._region = region
        self._canonical = canonical
        self._shape = canonical.shape_of(region.root)
        self._inputs = set(region.inputs.values())
        self._steps: list[_Step] = []  # each after those that use what it computes
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
        if self._canonical.shape_of(root) != self._shape:
            return None
        nodes: list[Any] = [None] * len(self._places)
        nodes[0] = root
        for place, target, arity, sources, literals, nested, kwargs in self._steps:
            node = nodes[place]
            args = node.args
            if node.target is not target or len(args) != arity:
                return None
            for i, source in sources:
                if not _put(nodes, source, args[i]):
                    return None
            for i, value in literals:
                if type(args[i]) is not type(value) or args[i] != value:
                    return None
            if nested and not all(_fits(want, args[i], nodes) for i, want in nested):
                return None
            if (kwargs or node.kwargs) and not _fits(kwargs, node.kwargs, nodes):
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

    def _visit(self, root: Node) -> None:
        todo = [root]
        self._places[root] = 0
        for node in todo:
            if (
                len(self._places) < _LARGEST
                and node not in self._inputs
                and (node in self._region.covered or self._canonical.is_transparent(node))
            ):
                new = [n for n in node.all_input_nodes if n not in self._places]
                self._places.update({n: len(self._places) + i for i, n in enumerate(new)})
                todo += new
                self._steps.append(self._step(node))
            else:
                self._given.append((self._places[node], _kind(node)))

    def _step(self, node: Node) -> _Step:
        args = [(i, self._template(a)) for i, a in enumerate(node.args)]
        return _Step(
            self._places[node],
            node.target,
            len(args),
            tuple([(i, a.number) for i, a in args if isinstance(a, _Place)]),
            tuple([(i, a) for i, a in args if not isinstance(a, (_Place, list, dict))]),
            tuple([(i, a) for i, a in args if isinstance(a, (list, dict))]),
            self._template(node.kwargs),
        )

    def _template(self, value: Any) -> Any:
        if isinstance(value, Node):
            return _Place(self._places[value])
        if isinstance(value, (tuple, list)):
            return [self._template(v) for v in value]
        if isinstance(value, dict):
            return {k: self._template(v) for k, v in value.items()}
        return value


def _put(nodes: list[Any], place: int, node: Any) -> bool:
    """Let ``node`` be what is at ``place``, unless another is."""
    if not isinstance(node, Node):  # an optional tensor that is left out, say
        return False
    if nodes[place] is None:
        nodes[place] = node
    return nodes[place] is node


def _fits(want: Any, have: Any, nodes: list[Any]) -> bool:
    """Whether an argument is that of the template, with nodes at their places."""
    kind = type(want)
    if kind is _Place:
        return _put(nodes, want.number, have)
    if kind is list:
        if not isinstance(have, (tuple, list)) or len(want) != len(have):
            return False
        return all(_fits(w, h, nodes) for w, h in zip(want, have, strict=True))
    if kind is dict:
        return (
            isinstance(have, dict)
            and want.keys() == have.keys()
            and all(_fits(w, have[k], nodes) for k, w in want.items())
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
