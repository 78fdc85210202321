"""Count where fusions could be, without the passes: in the graph that Dynamo captured.

That graph still has the calls that the model's code makes, and knows the modules that they came
from. So what is counted here depends on no decomposition, no rule and no equivalence:

* ``norm``: the modules that are a layer norm or an RMSNorm by their name, one site each;
* ``gate``: the products of an activation and something else;
* ``rotary``: the concatenations of a half and a negative half, or of a difference and a sum of
  products.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

__all__ = ["KINDS", "count_sites"]

KINDS = ("norm", "gate", "rotary")

_NORM = re.compile(r"(RMS|Layer)_?Norm", re.IGNORECASE)
_ACTIVATIONS = {F.silu, F.gelu, torch._C._nn.gelu, F.relu, torch.sigmoid}
_ACTIVATION_METHODS = {"silu", "sigmoid", "relu"}
_PRODUCTS = {operator.mul, operator.imul, torch.mul, torch.multiply}
_JOINS = {torch.cat, torch.concat, torch.stack}
_NEGATIVES = {operator.neg, torch.neg}
_CASTS = {"to", "float", "type", "type_as", "contiguous", "reshape", "view", "unsqueeze"}


def count_sites(module: GraphModule) -> Counter[str]:
    """How many sites of each of ``KINDS`` there are in a graph of Dynamo's."""
    nodes = list(module.graph.nodes)
    return Counter(
        norm=len(_norms(nodes)),
        gate=sum(map(_is_gate, nodes)),
        rotary=sum(map(_is_rotation, nodes)),
    )


def _norms(nodes: list[Node]) -> set[str]:
    """The innermost modules that are norms by name, as calls of them are told apart by path."""
    found: set[str] = set()
    for node in nodes:
        inner = [
            path
            for path, kind in node.meta.get("nn_module_stack", {}).values()
            if _NORM.search(kind if isinstance(kind, str) else kind.__name__)
        ]
        found.update(inner[-1:])
    return {p for p in found if not any(other.startswith(f"{p}.") for other in found)}


def _is_gate(node: Node) -> bool:
    if not _calls(node, _PRODUCTS, {"mul", "mul_"}):
        return False
    operands = [a for a in node.args if isinstance(a, Node)]
    if len(operands) != 2:
        return False
    first, second = map(_behind_casts, operands)
    gates = [_is_activation(first, second), _is_activation(second, first)]
    return any(gates)


def _is_activation(node: Node, other: Node) -> bool:
    """Whether ``node`` is an activation of anything but ``other``: ``x * sigmoid(x)`` is one too,
    which another product may gate.
    """
    if node.op == "call_function" and node.target in _PRODUCTS:
        sources = [_behind_casts(a) for a in node.args if isinstance(a, Node)]
        return len(sources) == 2 and any(
            _calls(a, {torch.sigmoid, F.sigmoid}, {"sigmoid"}) and b in a.all_input_nodes
            for a, b in (sources, sources[::-1])
        )
    if not _calls(node, _ACTIVATIONS - {torch.sigmoid}, _ACTIVATION_METHODS - {"sigmoid"}):
        return False
    return other not in node.all_input_nodes


def _is_rotation(node: Node) -> bool:
    if not _calls(node, _JOINS, set()):
        return False
    parts = node.args[0] if node.args else node.kwargs.get("tensors")
    if not isinstance(parts, (tuple, list)) or len(parts) != 2:
        return False
    first, second = parts
    if not isinstance(first, Node) or not isinstance(second, Node):
        return False
    if any(_calls(_behind_casts(p), _NEGATIVES, {"neg"}) for p in (first, second)):
        return True
    difference = _calls(first, {operator.sub, torch.sub}, {"sub"})
    products = [_calls(n, _PRODUCTS, {"mul"}) for n in first.all_input_nodes]
    return difference and _calls(second, {operator.add, torch.add}, {"add"}) and all(products)


def _behind_casts(node: Node) -> Node:
    while node.op == "call_method" and node.target in _CASTS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _calls(node: Node, functions: set[Any], methods: set[str]) -> bool:
    if node.op == "call_method":
        return node.target in methods
    return node.op == "call_function" and node.target in functions
