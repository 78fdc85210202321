"""Write a rule's pattern out as a graph of its own, with example sizes."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map

from .record import Call, Decompositions, record
from .rule import Rule

__all__ = ["example_graph"]

_INTEGER = 16  # divides the sizes, as groups and heads do
_FLOAT = 1e-5


def example_graph(rule: Rule, dtype: torch.dtype, decompositions: Decompositions) -> Graph:
    """The graph of ``rule``'s pattern for ``dtype``; raises what the pattern raises."""
    sizes: dict[str, int] = {f"${name}": _INTEGER for name in rule.integers}

    def size(wanted: Any) -> int:
        if isinstance(wanted, int):
            return wanted
        for symbol in sorted(wanted.free_symbols, key=str):
            sizes.setdefault(symbol.name, _INTEGER * (3 + 2 * len(sizes)))
        return int(wanted.xreplace({s: sympy.Integer(sizes[s.name]) for s in wanted.free_symbols}))

    mode = FakeTensorMode()
    with mode:
        tensors = {
            name: torch.empty([size(s) for s in spec.shape], dtype=spec.dtype, device=spec.device)
            for name, spec in rule.specs(dtype).items()
        }
    values = {**dict.fromkeys(rule.numbers, _FLOAT), **dict.fromkeys(rule.integers, _INTEGER)}
    recording = record(
        rule.pattern,
        tensors,
        {**values, **rule.fixed},
        mode=mode,
        decompositions=decompositions,
        what=f"The pattern of rule {rule}",
    )
    graph = Graph()
    nodes: dict[Call, Node] = {}
    for call in recording.calls:
        args, kwargs = tree_map(
            lambda a: nodes[a] if isinstance(a, Call) else a, (call.args, call.kwargs)
        )
        nodes[call] = (
            graph.placeholder(call.name)
            if call.op == "placeholder"
            else graph.call_function(call.target, args, kwargs)
        )
        nodes[call].meta["val"] = call.meta["val"]
    graph.output(tuple(nodes[c] for c in recording.outputs))
    return graph
