"""A match in a graph, and the checks that make rewriting it safe.

Nothing is changed here. The checks: every input of the replacement is a value that exists, no
value inside the match is needed outside of it, nothing is mutated in between, the replacement
would not need its own result, all values are on one device, and the rule's own ``check`` agrees.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from .canonical import Canonical
from .operations import is_split
from .region import Form, Region
from .reject import Reject
from .rule import Pattern, Rule
from .term import Shape, Size

__all__ = ["Match", "Mutations", "Site", "find_site"]


@dataclass(frozen=True)
class Match:
    """What a rule's ``check`` sees: sizes and numbers by name, input nodes, device.

    Where inputs broadcast, ``leading`` has the sizes that ``"..."`` stands for in each input.
    """

    rule: Rule
    dims: dict[str, Size]
    numbers: dict[str, Any]
    inputs: dict[str, Node]
    device: torch.device
    dtype: torch.dtype
    leading: dict[str, Shape] = field(default_factory=dict)

    def reject(self, message: str, *, hint: str = "", code: str = "check") -> Reject:
        return Reject(code, message, hint=hint)


@dataclass(frozen=True, eq=False)
class Site:
    """A match that passed the checks. ``before`` is where the replacement can be put."""

    pattern: Pattern
    match: Match
    outputs: tuple[Node | None, ...]
    covered: tuple[Node, ...]
    before: Node
    must_sort: bool
    form: Form | None = None  # sites of one form are replaced alike

    @property
    def anchor(self) -> Node:
        return next(o for o in self.outputs if o is not None)


class Mutations:
    """Those of the ``nodes`` that write to a tensor, with the storages that they write to."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.found: list[tuple[Node, set[int]]] = []
        for node in nodes:
            written = set(_written(node))
            if written:
                self.found.append((node, written))

    def __bool__(self) -> bool:
        return bool(self.found)

    def between(self, first: Node, last: Node, nodes: Iterable[Node]) -> Node | None:
        """A node from ``first`` to ``last`` that writes to a value of ``nodes``."""
        if not self.found:
            return None
        storages = {s for n in nodes for s in _storages(n.meta.get("val"))}
        for node, written in self.found:
            if first < node < last and written & storages:
                return node
        return None


def find_site(
    region: Region, canonical: Canonical, mutations: Mutations, going: Collection[Node] = ()
) -> Site | Reject:
    """Check a region and turn it into a site, or say what is unsafe about it.

    ``going`` are nodes of other matches that are rewritten too: what they use is not needed.
    """
    pattern, covered, numbers = region.pattern, region.covered, region.numbers
    rule = pattern.rule
    inputs: dict[str, Node] = {}
    for name, node in region.inputs.items():
        if node is None or node in covered or _is_part_of(node, covered):
            return Reject(
                "partial_kernel",
                f"{name} exists only inside a fused kernel that computes more than this rule.",
                node or next(iter(covered)),
            )
        inputs[name] = node
    for name, value in numbers.items():
        if isinstance(value, sympy.Expr):
            return Reject("scalar", f"{name} is known only when the graph runs ({value}).")
    reject = _extra_user(region, canonical, going)
    if reject is not None:
        return reject
    outputs = region.outputs
    if not any(outputs):
        return Reject("partial_kernel", "no output of the match exists in the graph.")
    devices = {n.meta["val"].device for n in (*inputs.values(), *filter(None, outputs))}
    if len(devices) > 1:
        return Reject("device", f"values are on {', '.join(sorted(map(str, devices)))}.")
    place = _place(inputs, outputs, covered)
    if isinstance(place, Reject):
        return place
    before, must_sort = place
    if mutations:
        reject = _mutated(mutations, inputs, covered, place, canonical)
        if reject is not None:
            return reject
    guard = _broken(pattern.traced.guards, tuple(region.dims.items()))
    if guard is not None:
        return Reject("guard", f"the pattern was traced for {_text(guard)}.")
    match = Match(
        rule,
        {name.removeprefix("$"): size for name, size in region.dims.items()},
        numbers,
        inputs,
        devices.pop(),
        pattern.dtype,
        region.leading,
    )
    if rule.check is not None:
        refused = _run_check(rule, match)
        if refused is not None:
            return refused.at(outputs[0])
    return Site(pattern, match, outputs, tuple(covered), before, must_sort, region.form)


@functools.lru_cache(1024)
def _broken(
    guards: tuple[sympy.Basic, ...], dims: tuple[tuple[str, Size], ...]
) -> sympy.Basic | None:
    """The first of a pattern's conditions that does not hold for these sizes."""
    known = dict(dims)
    for guard in guards:
        sizes = {s: known.get(s.name, s) for s in guard.free_symbols}
        if guard.xreplace(sizes) != sympy.true:
            return guard
    return None


def _mutated(
    mutations: Mutations,
    inputs: dict[str, Node],
    covered: dict[Node, None],
    place: tuple[Node, bool],
    canonical: Canonical,
) -> Reject | None:
    """Whether a value that the match reads is written to before the replacement would read it.

    Between an input and the match there may be copies and views that the match looks through.
    """
    before, must_sort = place
    between: dict[Node, None] = {}
    todo = [s for n in covered for s in n.all_input_nodes]
    while todo:
        node = todo.pop()
        if node not in between and node not in covered and canonical.is_transparent(node):
            between[node] = None
            todo += node.all_input_nodes
    involved = (*inputs.values(), *covered, *between)
    reads = (*covered, *between, before)
    writer = mutations.between(min(reads), max((*covered, before)), involved)
    if writer is None and must_sort:  # nodes would move, and what they read with them
        writer = mutations.found[0][0]
    if writer is None:
        return None
    return Reject(
        "mutation",
        f"{writer.name} writes to a value of the match between its nodes.",
        writer,
        expected="no mutation",
        found=str(writer.target),
        hint="Compute the match before the write, or write to a copy.",
    )


def _run_check(rule: Rule, match: Match) -> Reject | None:
    assert rule.check is not None
    try:
        refused: object = rule.check(match)
    except Exception as error:  # the check is the rule author's code
        return Reject("error", f"check of {rule} raised {type(error).__name__}: {error}")
    if refused is None or isinstance(refused, Reject):
        return refused
    return Reject(
        "error",
        f"check of {rule} returned {refused!r}.",
        hint="Return None to accept, match.reject('why') to refuse.",
    )


def _is_part_of(node: Node, covered: dict[Node, None]) -> bool:
    """Whether ``node`` is one of the outputs of a call inside the match."""
    return any(source in covered for source in node.all_input_nodes) and (
        getattr(node.target, "__name__", "") == "getitem"
    )


def _extra_user(region: Region, canonical: Canonical, going: Collection[Node]) -> Reject | None:
    covered = region.covered
    spared = {*region.outputs, *region.free}

    def outside(node: Node) -> Iterator[Node]:
        for user in node.users:
            if user in covered or user in going:
                continue
            if canonical.is_transparent(user) or _is_part_of(user, covered) or is_split(user):
                value = canonical.term(user)
                if user not in spared and (value is None or value.node not in region.outputs):
                    yield from outside(user)
            else:
                yield user

    for node in covered:
        if node in spared:
            continue
        users = list(outside(node))
        if users and len(covered) == 1:
            return Reject("partial_kernel", f"{node.name} computes more than this rule.", node)
        if users:
            names = ", ".join(
                "the graph's output" if u.op == "output" else u.name for u in users[:4]
            )
            return Reject(
                "extra_user",
                f"{node.name} is also used by {names}.",
                node,
                expected="used inside the match only",
                found=f"also used by {names}",
                hint="Make it an output of the rule, or compute it anew for the other user.",
            )
    return None


def _place(
    inputs: dict[str, Node],
    outputs: tuple[Node | None, ...],
    covered: dict[Node, None],
) -> tuple[Node, bool] | Reject:
    """The node before which the replacement goes, and whether the graph must be sorted after."""
    needs = list(inputs.values())
    given = [o for o in outputs if o is not None]
    if all(n < min(given) for n in needs):
        return min(given), False
    latest = max(needs)
    if all(latest < u for o in given for u in o.users if u not in covered):
        return latest.next, False
    late = [n for n in needs if not n < min(given)]
    blocker = _depends_on(late, set(given), min(given))
    if blocker is not None:
        return Reject(
            "cycle",
            f"{blocker.name}, an input of the match, is computed from its output.",
            blocker,
            expected="inputs that do not need an output",
            found=f"{blocker.name} needs {', '.join(g.name for g in given)}",
        )
    return latest.next, True


def _depends_on(nodes: list[Node], targets: set[Node], floor: Node) -> Node | None:
    """One of ``nodes`` that is computed from a target; nodes before ``floor`` cannot be."""
    for start in nodes:
        seen: set[Node] = set()
        todo = [start]
        while todo:
            node = todo.pop()
            if node in targets:
                return start
            for source in node.all_input_nodes:
                if source not in seen and not source < floor:
                    seen.add(source)
                    todo.append(source)
    return None


def _written(node: Node) -> Iterator[int]:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return
    if not node.target._schema.is_mutable:
        return
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, Node):
                    yield from _storages(item.meta.get("val"))


def _storages(value: Any) -> Iterator[int]:
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, torch.Tensor):
            yield item.untyped_storage()._cdata


def _text(guard: sympy.Basic) -> str:
    return str(guard).replace("$", "")
