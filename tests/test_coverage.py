"""Sites are counted without the passes, and what the passes took is set against them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from typer.testing import CliRunner

from compilepass import CompilationConfig
from compilepass.cli import app
from compilepass.coverage import FAMILIES, cover
from compilepass.sites import count_sites

pytest.importorskip("transformers")


def sites_of(model: Callable[..., Any], *args: Tensor) -> dict[str, int]:
    found: Counter[str] = Counter()

    def backend(module: GraphModule, inputs: Any) -> Any:
        found.update(count_sites(module))
        return module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*args)
    return {kind: n for kind, n in found.items() if n}


class Block(nn.Module):
    """Two norms, one of them inside of another module with norm in its name, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.heads = LayerNormPerHead()
        self.up, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.heads(self.norm(x))
        return self.up(x) * F.silu(self.gate(x).float()).to(x.dtype)


class LayerNormPerHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotated_pairs(x: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((-b, a), -1).flatten(-2)


def rotated_at_once(x: Tensor, y: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    c, d = y.chunk(2, -1)
    return torch.cat((a * c - b * d, b * c + a * d), -1)


X, Y = torch.randn(3, 8), torch.randn(3, 8)
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, int]]] = {
    "block": (Block(), (X,), {"norm": 2, "gate": 1}),
    "silu times its input is no gate": (lambda x: F.gelu(x) * x, (X,), {}),
    "gate by sigmoid": (lambda x, y: x * torch.sigmoid(x) * y, (X, Y), {"gate": 1}),
    "gelu": (lambda x, y: y * F.gelu(x, approximate="tanh"), (X, Y), {"gate": 1}),
    "halves": (lambda x, y: x * y + rotate_half(x) * y, (X, Y), {"rotary": 1}),
    "pairs": (lambda x, y: x * y + rotated_pairs(x) * y, (X, Y), {"rotary": 1}),
    "at once": (rotated_at_once, (X, Y), {"rotary": 1}),
    "another cat": (lambda x, y: torch.cat((x + y, x * y), -1), (X, Y), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_sites_are_counted_in_the_graph_of_dynamo(name: str) -> None:
    model, args, wanted = CASES[name]
    assert sites_of(model, *args) == wanted


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_model_with_rotary_norms_and_gates_is_covered(phase: str) -> None:
    found = cover("qwen3", dtype=torch.bfloat16, dynamic=phase == "decode", phase=phase)
    assert not found.error
    assert {k: str(s) for k, s in found.sites.items()} == {
        "norm": "9/9",
        "gate": "2/2",
        "rotary": "4/4",
    }
    assert found.is_whole and not found.near_misses


def test_what_a_pass_would_have_taken_is_missed_with_a_reason() -> None:

    found = cover("olmo", config=CompilationConfig(passes=["default", "-fuse_layer_norm"]))
    assert (str(found.sites["norm"]), str(found.sites["gate"])) == ("0/5", "2/2")
    assert not found.is_whole


def test_a_family_that_does_not_exist_is_an_answer_not_a_crash() -> None:
    found = cover("lama")
    assert "lama" in found.error and not found.is_whole


def test_the_command_prints_a_matrix_and_json() -> None:
    args = ["coverage", "--family", "phi", "--dtype", "fp32", "--phase", "prefill", "--static"]
    shown = CliRunner().invoke(app, args)
    assert shown.exit_code == 0
    assert "3/3" in shown.output and "norm 3 of 3, gate 0 of 0, rotary 4 of 4" in shown.output
    (told,) = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert told["sites"]["rotary"] == {"candidates": 4, "matched": 4}


@pytest.mark.parametrize("wrong", [["--dtype", "int4"], ["--phase", "training"]])
def test_the_command_names_a_wrong_word(wrong: list[str]) -> None:
    result = CliRunner().invoke(app, ["coverage", *wrong])
    assert result.exit_code == 2 and wrong[1] in result.output


def test_the_listed_families_are_known_to_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    assert len(FAMILIES) == 25 and not set(FAMILIES) - set(KNOWN)


def test_outputs_are_checked_where_that_is_asked_for() -> None:
    assert cover("llama", phase="decode", check=True).wrong == ()


def halve(graph: torch.fx.Graph) -> None:
    norm = graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default)[0]
    with graph.inserting_after(norm):
        half = graph.call_function(torch.ops.aten.mul.Tensor, (norm, 0.5))
    norm.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
    half.meta.update(norm.meta)


def test_an_output_out_of_bound_is_told() -> None:
    config = CompilationConfig(passes=["none", "+halve"])
    config.register_pass(halve)
    found = cover("llama", config=config, check=True)
    assert "logits" in found.wrong[0]
    assert not found.is_whole
