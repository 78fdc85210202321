"""Compute each value once.

Before::

    q1, s1 = quant_int8(x); q2, s2 = quant_int8(x)

After::

    q1, s1 = quant_int8(x)                                       # and q1, s1 in place of q2, s2
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from compilepass import Pass, PassContext, Phase

__all__ = ["EliminateCommonSubexpressions"]


class EliminateCommonSubexpressions(Pass):
    """Merge calls of one pure operation with the same arguments."""

    name = "eliminate_common_subexpressions"
    phase = Phase.CANONICALIZE
    after = ("eliminate_noops",)

    def run(self, graph: Graph, ctx: PassContext) -> int:
        changes = 0
        first: dict[Any, Node] = {}
        written = _written(graph)
        for node in list(graph.nodes):
            key = _key(node, written)
            if key is None:
                continue
            same = first.setdefault(key, node)
            if same is not node and not _both_returned(same, node):
                node.replace_all_uses_with(same)
                graph.erase_node(node)
                changes += 1
        return changes


def _key(node: Node, written: set[Node]) -> Any:
    if node.op != "call_function" or node in written:
        return None
    if node.target is not operator.getitem and not _is_pure(node.target):
        return None
    if not written.isdisjoint(node.all_input_nodes):
        return None
    key = (node.target, _frozen(node.args), _frozen(node.kwargs))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(argument: Any) -> Any:
    """The argument as a key: 1, 1.0 and True are equal but not the same argument."""
    if isinstance(argument, Node):
        return argument
    if isinstance(argument, (tuple, list)):
        return (type(argument), *map(_frozen, argument))
    if isinstance(argument, dict):
        return (dict, *((name, _frozen(value)) for name, value in argument.items()))
    if isinstance(argument, slice):
        return (slice, *map(_frozen, (argument.start, argument.stop, argument.step)))
    return type(argument), argument


def _is_pure(target: Any) -> bool:
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and target.namespace != "_c10d_functional"
    )


def _written(graph: Graph) -> set[Node]:
    """Every value that some operation writes to; what is read from one depends on when."""
    out: set[Node] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            out.update(node.all_input_nodes)
    return out


def _both_returned(a: Node, b: Node) -> bool:
    """Two outputs of a graph must stay two tensors."""
    return all(any(user.op == "output" for user in n.users) for n in (a, b))
