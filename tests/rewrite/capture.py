"""Compile a function up to code generation and look at the kernels that its graph then calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph

import compilepass as cp
from compilepass import inductor
from compilepass.compile import plan
from compilepass.kernels import find
from compilepass.passmanager import PassContext, PassManager


@dataclass(frozen=True)
class Compiled:
    """The graph after the passes, what it returned, and the records of the run and of a second."""

    graph: Graph
    result: Any
    changes: int
    changes_again: int

    @property
    def kernels(self) -> dict[str, int]:
        """How often each kernel is called, by the op's short name."""
        called = (n.target for n in self.graph.nodes if n.op == "call_function" and find(n.target))
        return dict(Counter(str(op).split(".")[1] for op in called))


def compiled(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    dynamic: bool = False,
    passes: Sequence[str] = ("default",),
) -> Compiled:
    """Compile ``fn`` with the passes, run it, and run the passes on the result once more."""
    config = cp.CompilationConfig(backend="fx", passes=list(passes))
    manager = PassManager(plan(config), inductor.engine(), strict=True)
    graphs: list[Graph] = []
    changes: list[int] = []

    def run(graph: Graph, is_inference: bool) -> None:
        graphs.append(graph)
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
    return Compiled(graph, result, changes[0], changes[1])
