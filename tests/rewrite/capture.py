"""Compile a function up to code generation and look at the kernels that its graph then calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

import compilepass as cp
from compilepass import inductor
from compilepass.compile import plan
from compilepass.kernels import find
from compilepass.passmanager import PassContext, PassManager


@dataclass(frozen=True)
class Compiled:
    """The graph after the passes, what it returned, and the records of the run and of a second.

    ``outputs`` and ``outputs_before`` are what the graph itself gave, with and without the passes.
    """

    graph: Graph
    result: Any
    changes: int
    changes_again: int
    outputs: tuple[Any, ...]
    outputs_before: tuple[Any, ...]

    @property
    def kernels(self) -> dict[str, int]:
        """How often each kernel is called, by the op's short name."""
        return dict(Counter(name for name, _ in self._calls()))

    def kernels_of(self, dtype: torch.dtype) -> dict[str, int]:
        """How often each kernel is called on a first operand of ``dtype``."""
        return dict(Counter(name for name, node in self._calls() if _first(node).dtype == dtype))

    def _calls(self) -> Iterator[tuple[str, Node]]:
        for node in self.graph.nodes:
            if node.op == "call_function" and find(node.target):
                yield str(node.target).split(".")[1], node


#: without what takes linear layers on some machines only, and what pairs the calls of others
PASSES = ("default", "-fuse_linear", "-fuse_qk_rope")


def compiled(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    dynamic: bool = False,
    passes: Sequence[str] = PASSES,
) -> Compiled:
    """Compile ``fn`` with the passes, run it, and run the passes on the result once more."""
    config = cp.CompilationConfig(backend="fx", passes=list(passes))
    manager = PassManager(plan(config), inductor.engine(), strict=True)
    graphs: list[Graph] = []
    changes: list[int] = []
    outputs: list[tuple[Any, ...]] = []

    def run(graph: Graph, is_inference: bool) -> None:
        graphs.append(graph)
        whole = graph.owning_module
        before = GraphModule(whole, _copy(graph))

        def keep(_: Any, args: tuple[Any, ...], out: tuple[Any, ...]) -> None:
            if not outputs:  # the first call of a lazy module goes through it twice
                outputs.extend((out, before(*args)))

        whole.register_forward_hook(keep)
        for _ in range(2):
            record = manager.run(graph, PassContext("cpu", "fx", is_inference))
            changes.append(sum(p.changes for p in record.passes))

    def backend(gm: Any, inputs: Any) -> Any:
        inductor.specialize_floats(gm)
        return inductor.compile_graph(gm, inputs, run, backend="fx", uuid="", options={})

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (graph,) = graphs
    return Compiled(graph, result, changes[0], changes[1], *outputs)


def _first(node: Node) -> torch.Tensor:
    val: torch.Tensor = node.all_input_nodes[0].meta["val"]
    return val


def _copy(graph: Graph) -> Graph:
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy
