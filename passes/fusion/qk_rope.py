"""Queries and keys rotated by one call of a kernel, where each is by a call of its own.

Before::

    q = compilepass.rotate(q, cos, sin)
    k = compilepass.rotate(k, cos, sin)

After::

    both = compilepass.rotate_qk(q, k, cos, sin)
    q, k = both[0], both[1]

No pattern can say this, since neither result leads to the other: calls are paired that agree in all
but what is rotated, unless one of them needs the other.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from compilepass import Pass, PassContext, Phase
from compilepass.kernels import find

__all__ = ["FuseQKRope"]

#: the op for one tensor: the op for two, and how many arguments each of the two has of its own
PAIRS = {
    "compilepass::rotate": ("compilepass::rotate_qk", 1),
    "compilepass::rms_norm_rotate": ("compilepass::rms_norm_rotate_qk", 2),
}


class FuseQKRope(Pass):
    """The calls that ``fuse_rope`` and ``fuse_qk_norm_rope`` put in, two by two."""

    name = "fuse_qk_rope"
    phase = Phase.LOWER  # when all are there
    kernels = tuple(both for both, _ in PAIRS.values())

    def run(self, graph: Graph, ctx: PassContext) -> int:
        waiting: dict[Any, Node] = {}
        changes = 0
        for node in list(graph.nodes):
            op = find(node.target)
            if op is None or op.name not in PAIRS:
                continue
            shared = (op.name, *_arguments(node)[PAIRS[op.name][1] :])
            first = waiting.pop(shared, None)
            if first is not None and _merge(first, node, ctx):
                changes += 1
            else:
                waiting[shared] = node
        return changes


def _arguments(node: Node) -> tuple[Any, ...]:
    """All arguments in order, those that the call leaves to the schema too."""
    target: Any = node.target
    given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False))
    given |= node.kwargs
    return tuple(given.get(a.name, a.default_value) for a in target._schema.arguments)


def _merge(first: Node, second: Node, ctx: PassContext) -> bool:
    """Replace two calls by one in the place of the second, if there can be one."""
    late = _dependents(first, second)
    op = find(first.target)
    assert op is not None
    name, own = PAIRS[op.name]
    one, two = _arguments(first), _arguments(second)
    args = (*(a for pair in zip(one[:own], two[:own], strict=True) for a in pair), *one[own:])
    both = find(name)
    assert both is not None
    values = torch.fx.map_arg(args, lambda n: n.meta["val"])
    if late is None or both.supports(ctx.device_type, *values):
        return False
    graph = first.graph
    with graph.inserting_before(second):
        merged = graph.call_function(both.overload, args)
        merged.meta = {**first.meta, "val": (first.meta["val"], second.meta["val"])}
        for i, node in enumerate((first, second)):
            result = graph.call_function(operator.getitem, (merged, i))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
    for node in late:
        second.prepend(node)
    for node in (first, second):
        graph.erase_node(node)
    return True


def _dependents(first: Node, second: Node) -> list[Node] | None:
    """What needs ``first`` and stands before ``second``; ``None`` where that cannot move."""
    dependents = {first: None}
    node = first.next
    while node is not second:
        if any(source in dependents for source in node.all_input_nodes):
            if node.is_impure():  # must not move past what it changes
                return None
            dependents[node] = None
        node = node.next
    if any(source in dependents for source in second.all_input_nodes):
        return None
    return list(dependents)[1:]
