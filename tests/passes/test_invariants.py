"""What every shipped pass keeps, on graphs of real models as they reach it in the plan."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compilepass.passes import shipped_passes
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter
from torch.utils._pytree import tree_leaves

import compilepass as cp
from compilepass import Pass, PassContext, inductor
from compilepass.passmanager import PassManager, Plan, build_plan
from compilepass.passmanager.discovery import known_passes
from compilepass.passmanager.graph_code import graph_source
from compilepass.testing import graph_of

EXAMPLES = Path(__file__).parents[2] / "examples"
CTX = PassContext("cpu", "fx", True)
#: int8 values may differ by one where a value falls on the edge of two
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.int8: 1}
NATIVE = cp.CompilationConfig(custom_ops=["none"])


def int8_block() -> tuple[nn.Module, tuple[Tensor, ...]]:
    with pytest.MonkeyPatch.context() as patch, cp.use_config(NATIVE):
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        from int8_llama import block

        return block(hidden=64, intermediate=128, heads=4, tokens=8, layers=2)  # type: ignore[no-any-return]


def hugging_face(family: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=97,
        use_cache=False,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    return model.eval().requires_grad_(False), (torch.arange(8).reshape(1, 8),)


def merged_llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, args = hugging_face("Llama")
    cp.merge_linears_(model)
    return model, args


MODELS: dict[str, tuple[Callable[[], Any], bool | None]] = {
    "int8_block": (int8_block, None),
    "int8_block_dynamic": (int8_block, True),
    "hf_llama": (functools.partial(hugging_face, "Llama"), None),
    "hf_llama_merged": (merged_llama, None),
    "hf_llama_merged_dynamic": (merged_llama, True),
    "hf_qwen3": (functools.partial(hugging_face, "Qwen3"), None),
}


@functools.cache
def _captured(name: str) -> GraphModule:
    """The graph of a model that no pass has touched."""
    torch.manual_seed(20240607)
    make, dynamic = MODELS[name]
    model, args = make()
    return graph_of(model, args, cp.CompilationConfig(passes=["none"], dynamic=dynamic))


@pytest.fixture(params=MODELS)
def model_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


each_pass = pytest.mark.parametrize("cls", shipped_passes(), ids=lambda cls: cls.name)


def a_copy(graph: Graph) -> Graph:
    copy = Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    return GraphModule(graph.owning_module, copy).graph  # type: ignore[arg-type]


def before_pass(name: str, cls: type[Pass]) -> Graph:
    """The graph of a model as it reaches a pass: all passes before it have run."""
    graph = a_copy(_captured(name).graph)
    entries = [e for e in plan().entries if e.name != cls.name]
    stop = [e.name for e in plan().entries].index(cls.name)
    run_all(Plan(tuple(entries[:stop])), graph)
    return graph


@functools.cache
def plan() -> Plan:
    config = cp.CompilationConfig(passes=["all"])
    return build_plan(known_passes(config, lambda _: None), config.pass_policy())


def run_all(passes: Plan, graph: Graph) -> dict[str, int]:
    record = PassManager(passes, inductor.engine(), strict=True).run(graph, CTX)
    return {p.name: p.changes for p in record.passes}


def run(cls_or_pass: Any, graph: Graph) -> int:
    made = cls_or_pass() if isinstance(cls_or_pass, type) else cls_or_pass
    (entry,) = [e for e in plan().entries if e.name == made.name]
    return run_all(Plan((dataclasses.replace(entry, pass_=made),)), graph)[made.name]


class Recorded(Interpreter):
    """Runs a graph on its fake inputs and compares each value with the metadata."""

    def run_node(self, n: Any) -> Any:
        made, said = super().run_node(n), n.meta.get("val")
        if n.op != "output":
            for a, b in zip(tree_leaves(made), tree_leaves(said), strict=True):
                assert described(a) == described(b), f"{n.name} = {n.target}"
        return made


def described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return str(value)
    # the stride of a dim of one element means nothing
    layout = [(str(n), str(s)) for n, s in zip(value.shape, value.stride(), strict=True) if n != 1]
    return value.dtype, value.device, tuple(map(str, value.shape)), layout


def check_metadata(graph: Graph) -> None:
    fakes = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    mode = next(f.fake_mode for f in fakes if isinstance(f, Tensor))
    with mode, torch.no_grad():
        Recorded(GraphModule(graph.owning_module, graph)).run(*fakes)  # type: ignore[arg-type]


def program(graph: Graph) -> dict[str, Any]:
    """The graph as a dumped file is: it brings inputs of its own, the same every time."""
    space: dict[str, Any] = {"__name__": "dumped"}
    exec(graph_source(graph, "A graph."), space)
    return space


def check_outputs(before: Graph, after: Graph) -> None:
    one, other = program(before), program(after)
    with torch.no_grad():
        wanted, got = one["forward"](*one["inputs"]()), other["forward"](*one["inputs"]())
    for a, b in zip(tree_leaves(wanted), tree_leaves(got), strict=True):
        if isinstance(a, Tensor):
            tolerance = TOLERANCE.get(a.dtype, 0)
            torch.testing.assert_close(b, a, atol=tolerance, rtol=tolerance)


@each_pass
def test_the_graph_stays_valid_with_the_right_metadata_and_results(
    cls: type[Pass], model_name: str
) -> None:
    graph = before_pass(model_name, cls)
    before = a_copy(graph)
    run(cls, graph)
    graph.lint()
    check_metadata(graph)
    check_outputs(before, graph)


@each_pass
def test_a_second_run_changes_nothing(cls: type[Pass], model_name: str) -> None:
    graph = before_pass(model_name, cls)
    run(cls, graph)
    text = str(graph)
    assert run(cls, graph) == 0
    assert str(graph) == text


@each_pass
def test_two_runs_give_the_same_graph_and_nothing_is_kept_between_them(cls: type[Pass]) -> None:
    """One pass object on the graphs of two models in turn, and a new one."""
    shared, texts = cls(), []
    for made, name in [(shared, "int8_block"), (shared, "hf_llama"), (shared, "int8_block"),
                       (cls(), "int8_block")]:  # fmt: skip
        graph = before_pass(name, cls)
        count = run(made, graph)
        texts.append((count, str(graph)))
    assert texts[0] == texts[2] == texts[3]


@each_pass
def test_zero_changes_is_no_change(cls: type[Pass], model_name: str) -> None:
    graph = before_pass(model_name, cls)
    text = str(graph)
    assert (run(cls, graph) == 0) == (str(graph) == text)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("int8_block", {"fuse_norm_quant": 4, "fuse_act_quant": 2, "fuse_int8_linear": 8}),
        ("int8_block_dynamic", {"fuse_norm_quant": 4, "fuse_act_quant": 2, "fuse_int8_linear": 8}),
        ("hf_llama", {"fuse_add_rms_norm": 2, "fuse_norm_quant": 0}),
        ("hf_llama_merged", {"merge_linears": 2, "fuse_add_rms_norm": 2, "fuse_rope": 2}),
        ("hf_llama_merged_dynamic", {"merge_linears": 2, "fuse_rope": 2}),
        ("hf_qwen3", {"fuse_qk_norm_rope": 2, "fuse_add_rms_norm": 2, "fuse_rope": 0}),
    ],
)
def test_the_models_have_something_for_the_fusions(name: str, counts: dict[str, int]) -> None:
    """Otherwise the tests above would be of nothing."""
    found = run_all(plan(), a_copy(_captured(name).graph))
    assert {k: found[k] for k in counts} == counts
