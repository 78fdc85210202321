#!/usr/bin/env python3
"""Time the rewrite engine against Inductor's own matcher on the graph of a deep Llama.

    python scripts/bench/engine.py [--json out.json] [--repeats 5] [--layers 32]

Both get copies of one graph, captured behind AOTAutograd where passes see it, and do the same rule:
an RMSNorm becomes one kernel call. Runs are interleaved; the minimum of each is shown. The graph is
built from a transformers config with random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch.fx import GraphModule

import compilepass as cp
from compilepass import inductor
from compilepass.kernels import ensure_loaded, native
from compilepass.passmanager import FusionPass, PassContext
from compilepass.rewrite import Engine, Rule

OPS = torch.ops.compilepass
RIVAL = "register_replacement"


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return native.rms_norm(x, weight, eps)


def kernel(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return OPS.rms_norm(x, weight, eps)  # type: ignore[no-any-return]


RULE = Rule(norm, kernel, {"x": ("...", "H"), "weight": ("H",)})


def capture(layers: int, dynamic: bool) -> GraphModule:
    """The graph of a Llama of ``layers`` layers as passes see it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    found: list[GraphModule] = []

    class Keep(cp.Pass):
        name = "keep"

        def run(self, graph: torch.fx.Graph, ctx: PassContext) -> int:
            found.append(copy_of(graph.owning_module))
            return 0

    settings = cp.CompilationConfig(backend="fx", passes=["none", "+keep"], dynamic=dynamic or None)
    settings.register_pass(Keep())
    with torch.no_grad():
        cp.compile(model, settings)(torch.randint(0, 128, (2, 16)))
    torch._dynamo.reset()
    return found[0]


def copy_of(module: GraphModule) -> GraphModule:
    """A copy whose nodes share the fake values, which no run changes."""
    graph = torch.fx.Graph()
    values: dict[Any, Any] = {}
    graph.output(graph.graph_copy(module.graph, values))
    for old, new in values.items():
        new.meta = dict(old.meta)
    return GraphModule(module, graph)


def ours(engine: Engine, rules: list[Rule]) -> Callable[[GraphModule], int]:
    return lambda module: sum(r.count for r in engine.apply(module.graph, rules))


def ours_told(engine: Engine, rules: list[Rule]) -> Callable[[GraphModule], int]:
    """The same with what a report shows: candidates and near misses."""

    def run(module: GraphModule) -> int:
        results = engine.apply(module.graph, rules)
        assert all(r.candidates >= 0 and (r.near_miss or True) for r in results)
        return sum(r.count for r in results)

    return run


def inductors() -> Callable[[GraphModule], int]:
    from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

    matcher = PatternMatcherPass()
    example = [torch.randn(2, 16, 64), torch.randn(64)]
    register_replacement(
        lambda x, w: native.rms_norm(x, w, 1e-6),
        lambda x, w: OPS.rms_norm(x, w, 1e-6),
        example,
        fwd_only,
        matcher,
    )
    return lambda module: int(matcher.apply(module.graph))


def time_all(
    graph: GraphModule, runs: dict[str, Callable[[GraphModule], int]], repeats: int
) -> dict[str, dict[str, float]]:
    best: dict[str, dict[str, float]] = {}
    for _ in range(repeats):
        for name, run in runs.items():
            module = copy_of(graph)
            start = time.perf_counter()
            matches = run(module)
            ms = (time.perf_counter() - start) * 1e3
            known = best.setdefault(name, {"ms": ms, "matches": matches})
            known["ms"] = min(known["ms"], ms)
    return best


def shipped_rules() -> list[Rule]:
    ctx = PassContext("cpu", "fx", True)
    return [r for p in cp.plan().running if isinstance(p, FusionPass) for r in p.rules(ctx)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ensure_loaded("cpu")
    engine = inductor.engine()
    first = capture(args.layers, dynamic=False)  # loads what any compile loads
    every = shipped_rules()
    engine.pattern(RULE, torch.float32)  # loads what PyTorch and sympy need for symbolic sizes
    start = time.perf_counter()
    for rule in every:
        engine.pattern(rule, rule.dtypes[0])
    registration = (time.perf_counter() - start) * 1e3
    results: dict[str, Any] = {
        f"registration of all {len(every)} shipped rules": {"ms": registration}
    }
    everything = {
        "one rule": ours(engine, [RULE]),
        "all shipped rules": ours(engine, every),
        "all shipped rules, near misses told": ours_told(engine, every),
    }
    cases = [(args.layers, False), (args.layers, True), (2 * args.layers, False)]
    for layers, dynamic in cases:
        graph = first if (layers, dynamic) == cases[0] else capture(layers, dynamic)
        runs = dict(everything)
        if layers == args.layers:
            runs[RIVAL] = inductors()
        label = f"{layers} layers{', dynamic' if dynamic else ''}, {len(graph.graph.nodes)} nodes"
        timed = time_all(graph, runs, args.repeats)
        if RIVAL in timed:
            timed["one rule"]["times"] = timed[RIVAL]["ms"] / timed["one rule"]["ms"]
        results.update({f"{label}: {name}": result for name, result in timed.items()})
    table = Table(
        "case",
        "ms",
        "matches",
        f"times {RIVAL}",
        title=f"torch {torch.__version__}, 1 thread, minimum",
    )
    for name, result in results.items():
        matches = str(int(result["matches"])) if "matches" in result else ""
        times = f"{result['times']:.0f}" if "times" in result else ""
        table.add_row(name, f"{result['ms']:.1f}", matches, times)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
