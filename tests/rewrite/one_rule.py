"""Apply one rule to the graph of a function, or to a graph written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

import compilepass as cp
from compilepass import inductor
from compilepass.passmanager import FusionPass, PassContext
from compilepass.reporting import NearMiss
from compilepass.rewrite import Rule, RuleResult

__all__ = ["Applied", "HandMade", "Rules", "apply", "compile_with_rules"]

aten = torch.ops.aten


class Rules(FusionPass):
    """The rules of one test, as the pass ``rules_of_test``."""

    name = "rules_of_test"

    given: tuple[Rule, ...] = ()

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        return self.given


@dataclass(frozen=True)
class Applied:
    """What a rule did to a graph, and what the graph then returned."""

    result: RuleResult
    near: NearMiss | None
    unchanged: bool
    output: Any
    graph: Graph


def apply(
    fn: Callable[..., Any], args: Sequence[Any], rule: Rule, *, dynamic: bool | None = False
) -> Applied:
    """Compile ``fn`` up to code generation with ``rule`` alone, and run it."""
    seen: list[Applied] = []

    def run(graph: Graph, is_inference: bool) -> None:
        before = _text(graph)
        (result,) = inductor.engine().apply(graph, [rule])
        graph.lint()
        seen.append(Applied(result, result.near_miss, _text(graph) == before, None, graph))

    def backend(gm: Any, inputs: Any) -> Any:
        inductor.specialize_floats(gm)
        return inductor.compile_graph(gm, inputs, run, backend="fx", uuid="", options={})

    torch._dynamo.reset()
    with torch.no_grad():
        output = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (applied,) = seen
    return Applied(applied.result, applied.near, applied.unchanged, output, applied.graph)


def compile_with_rules(fn: Callable[..., Any], *rules: Rule, **config: Any) -> Any:
    """``cp.compile`` with a pass of these rules and no other."""
    given = cp.CompilationConfig(backend="fx", passes=["none", "+rules_of_test"], **config)
    given.register_pass(Rules(rules))
    torch._dynamo.reset()
    return cp.compile(fn, given)


class HandMade:
    """A graph built node by node with fake values: what a functional capture never contains."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode()

    def input(self, name: str, *shape: int, device: str = "cpu") -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, device=device)
        return node

    def call(self, op: Any, *args: Any) -> Node:
        node = self.graph.call_function(op, args)
        values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
        with self.mode:
            node.meta["val"] = op(*values)
        return node

    def apply(self, rule: Rule, *outputs: Node) -> Applied:
        """Apply ``rule`` to the graph that returns ``outputs``."""
        self.graph.output(outputs)
        before = _text(self.graph)
        (result,) = inductor.engine().apply(self.graph, [rule])
        self.graph.lint()
        unchanged = _text(self.graph) == before
        return Applied(result, result.near_miss, unchanged, None, self.graph)

    def run(self, *inputs: Tensor) -> Any:
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)(*inputs)


def _text(graph: Graph) -> list[str]:
    return [node.format_node() or "" for node in graph.nodes]
