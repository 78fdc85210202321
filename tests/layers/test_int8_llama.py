"""The example model: its structure, and that every policy computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import compilepass as cp
from compilepass.config import CompilationConfig, use_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "int8_llama.py"
SMALL = {"hidden": 32, "intermediate": 48, "heads": 4, "tokens": 6, "layers": 2}
# Outputs are near one. Where sums are taken in another order, a value may be quantised to the
# neighbouring step.
ATOL = {torch.float32: 0.05, torch.bfloat16: 0.1}


@pytest.fixture(scope="module")
def block() -> Callable[..., Any]:
    spec = spec_from_file_location("int8_llama", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    built: Callable[..., Any] = module.block
    return built


@pytest.mark.parametrize("dtype", ATOL, ids=str)
@torch.no_grad()
def test_all_policies_compute_the_same(block: Callable[..., Any], dtype: torch.dtype) -> None:
    results = []
    for policy in ("none", "all"):
        with use_config(CompilationConfig(custom_ops=policy)):
            model, inputs = block(**SMALL, dtype=dtype)
        results.append(model(*inputs))
    assert results[0].shape == (6, 32)
    assert results[0].dtype == dtype
    torch.testing.assert_close(*results, rtol=0, atol=ATOL[dtype])


@torch.no_grad()
def test_its_graph_has_the_ops_of_the_structure(block: Callable[..., Any]) -> None:
    """Per layer: two norms, four quantised linears, one gate; only the first norm adds nothing."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    with use_config(CompilationConfig(custom_ops="all")):
        model, inputs = block(**SMALL)
    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    (graph,) = graphs
    called = Counter(str(node.target) for node in graph.graph.nodes)
    assert {name: n for name, n in called.items() if name.startswith("compilepass.")} == {
        "compilepass.rms_norm": 1,
        "compilepass.fused_add_rms_norm": 3,
        "compilepass.quant_int8": 8,
        "compilepass.int8_linear": 8,
        "compilepass.rotary_embedding": 2,
        "compilepass.silu_and_mul": 2,
    }


@torch.no_grad()
def test_a_later_token_changes_no_earlier_one(block: Callable[..., Any]) -> None:
    model, (x,) = block(**SMALL)
    changed = x.clone()
    changed[-1] += 1
    torch.testing.assert_close(model(changed)[:-1], model(x)[:-1], rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["none", "none,+rms_norm", "all"])
@torch.no_grad()
def test_its_norms_and_gates_fuse_with_their_quantisation(
    block: Callable[..., Any], policy: str
) -> None:
    fused = {"fuse_norm_quant": 4, "fuse_act_quant": 2}
    config = CompilationConfig(custom_ops=policy, backend="fx", expect=fused)
    with use_config(config):
        model, inputs = block(**SMALL)
    compiled = cp.compile(model, config)
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=0, atol=ATOL[torch.float32])
