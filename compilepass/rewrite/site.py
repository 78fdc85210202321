"""A match in a graph, and the checks that make rewriting it safe.

Nothing is changed here. The checks: every input of the replacement is a value that exists, no
value inside the match is needed outside of it, nothing is mutated in between, the replacement
would not need its own result, all values are on one device, and the rule's own ``check`` agrees.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from .canonical import Canonical
from .match import Bindings
from .operations import is_split
from .reject import Reject
from .rule import Pattern, Rule
from .term import Shape, Size, Term, same, size_of
from .trace import size_symbol

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

    @property
    def anchor(self) -> Node:
        return next(o for o in self.outputs if o is not None)


class Mutations:
    """The nodes of a graph that write to a tensor, with the storages that they write to."""

    def __init__(self, graph: Graph) -> None:
        self.found: list[tuple[Node, set[int]]] = []
        for node in graph.nodes:
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
    pattern: Pattern,
    bound: Bindings,
    canonical: Canonical,
    mutations: Mutations,
    going: Collection[Node] = (),
) -> Site | Reject:
    """Check a unification and turn it into a site, or say what is unsafe about it.

    ``going`` are nodes of other matches that are rewritten too: what they use is not needed.
    """
    rule = pattern.rule
    inner = bound.inner
    covered = bound.covered
    inputs: dict[str, Node] = {}
    for name, term in pattern.traced.inputs.items():
        node = bound.terms[term].node
        if node is None or node in covered or _is_part_of(node, covered):
            return Reject(
                "partial_kernel",
                f"{name} exists only inside a fused kernel that computes more than this rule.",
                node or next(iter(covered)),
            )
        inputs[name] = _as_used(pattern, name, bound, canonical, node)
    numbers = {**bound.numbers, **{n: bound.dims[f"${n}"] for n in rule.integers}}
    for name, value in numbers.items():
        if isinstance(value, sympy.Expr):
            return Reject("scalar", f"{name} is known only when the graph runs ({value}).")
    out_terms = [bound.terms[t] for t in pattern.traced.outputs]
    free = _shared_for_free(pattern, bound)
    reject = _extra_user(inner, out_terms, free, covered, canonical, going)
    if reject is not None:
        return reject
    outputs = tuple(t.node for t in out_terms)
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
    for guard in pattern.traced.guards:
        known = {s: bound.dims.get(s.name, s) for s in guard.free_symbols}
        if guard.xreplace(known) != sympy.true:
            return Reject("guard", f"the pattern was traced for {_text(guard)}.")
    match = Match(
        rule,
        {name.removeprefix("$"): size for name, size in bound.dims.items()},
        numbers,
        inputs,
        devices.pop(),
        pattern.dtype,
        _leading(pattern, bound),
    )
    if rule.check is not None:
        refused = _run_check(rule, match)
        if refused is not None:
            return refused.at(outputs[0])
    return Site(pattern, match, outputs, tuple(covered), before, must_sort)


def _leading(pattern: Pattern, bound: Bindings) -> dict[str, Shape]:
    if not bound.leading:
        return {}
    return {
        name: bound.leading.get(term, bound.leading[None])
        for name, term in pattern.traced.inputs.items()
        if pattern.rule.is_open(name)
    }


def _as_used(
    pattern: Pattern, name: str, bound: Bindings, canonical: Canonical, node: Node
) -> Node:
    """The view of an input that the match reads, where how inputs broadcast decides on one.

    Sites that share a table share its view, which may be a copy.
    """
    lead = _leading(pattern, bound).get(name)
    if lead is None:
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


def _shared_for_free(pattern: Pattern, bound: Bindings) -> set[Term]:
    """Casts of an input: another user of one keeps it alive, and nothing is computed twice."""
    return {
        bound.terms[p]
        for p in pattern.traced.terms
        if p.op == "cast" and p.args[0].op == "input" and p not in pattern.traced.outputs
    }


def _extra_user(
    inner: list[Term],
    outputs: list[Term],
    free: set[Term],
    covered: dict[Node, None],
    canonical: Canonical,
    going: Collection[Node],
) -> Reject | None:
    spared = {t.node for t in (*outputs, *free)}

    def outside(node: Node) -> Iterator[Node]:
        for user in node.users:
            if user in covered or user in going:
                continue
            if canonical.is_transparent(user) or _is_part_of(user, covered) or is_split(user):
                if user not in spared and canonical.term(user) not in outputs:
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
