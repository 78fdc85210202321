"""``quantize_``: which linear layers of a model are swapped, what is left and why."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilepass as cp
from compilepass.config import CompilationConfig, use_config
from compilepass.errors import OpTypeError, OpValueError
from compilepass.layers import Fp8Linear, Int8Linear, WeightOnlyInt8Linear

os.environ["HF_HUB_OFFLINE"] = "1"

LAYERS = {"int8": Int8Linear, "weight_only_int8": WeightOnlyInt8Linear, "fp8": Fp8Linear}
# Of the logits of two layers with random weights, relative to their size.
ERROR = {"int8": 0.05, "weight_only_int8": 0.03, "fp8": 0.15}
every_scheme = pytest.mark.parametrize("scheme", LAYERS)
TOKENS = torch.arange(12).view(2, 6)


def llama(seed: int = 0, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(TOKENS).logits
    return out


def linears(model: nn.Module, layer: type[nn.Module] = nn.Linear) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is layer]


@every_scheme
@pytest.mark.parametrize("policy", ["none", "all"])
def test_every_linear_of_a_model_is_swapped_and_it_computes_nearly_the_same(
    scheme: str, policy: str
) -> None:
    model = llama()
    names, wanted = linears(model), logits(model)
    with use_config(CompilationConfig(custom_ops=policy)):
        report = cp.quantize_(model, scheme)
    assert list(report.swapped) == names == linears(model, LAYERS[scheme])
    assert len(names) == 15
    assert (report.kept, linears(model)) == ((), [])
    assert (logits(model) - wanted).norm() < ERROR[scheme] * wanted.norm()
    assert report.bytes_after < 0.3 * report.bytes_before
    assert not model.get_submodule(names[0]).training


@every_scheme
def test_a_state_dict_moves_from_one_quantised_model_to_another(scheme: str) -> None:
    first, second = llama(seed=1), llama(seed=2)
    for model in (first, second):
        cp.quantize_(model, scheme)
    assert not torch.equal(logits(first), logits(second))
    second.load_state_dict(first.state_dict())
    assert torch.equal(logits(first), logits(second))


def test_a_head_tied_to_the_embedding_is_left_and_told() -> None:
    model = llama(tied=True)
    report = cp.quantize_(model)
    assert [kept.name for kept in report.kept] == ["lm_head"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "kept lm_head: its weight is model.embed_tokens.weight too" in str(report)
    assert str(report).startswith("int8: 14 of 15 linear layers are Int8Linear, ")


@pytest.mark.parametrize(
    ("filter", "count"),
    [
        ("*.mlp.*", 6),
        ("model.layers.1.*", 7),
        ("lm_head", 1),
        ("nothing", 0),
        (lambda name, linear: linear.out_features == 96, 4),
        (lambda name, linear: name.endswith("_proj"), 14),
    ],
)
def test_a_filter_selects_by_name_or_layer(filter: Any, count: int) -> None:
    model = llama()
    report = cp.quantize_(model, "weight_only_int8", filter)
    assert len(report.swapped) == len(linears(model, WeightOnlyInt8Linear)) == count
    assert {kept.reason for kept in report.kept} <= {"the filter does not select it"}
    assert report.linears == 15


class Twice(nn.Module):
    """One layer at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first


def test_a_layer_at_two_places_stays_one() -> None:
    model = Twice()
    report = cp.quantize_(model)
    assert report.swapped == ("first", "second")
    assert isinstance(model.first, Int8Linear)
    assert model.first is model.second


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (hooked, "it has hooks, which would be lost"),
        (lambda: nn.MultiheadAttention(8, 2), "NonDynamicallyQuantizableLinear"),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
            "it is a ParametrizedLinear",
        ),
        (lambda: nn.Sequential(nn.Linear(8, 8, device="meta")), "meta device"),
        (lambda: nn.Sequential(nn.Linear(8, 0)), "its weight is empty"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_would_change_is_left_and_told(build: Callable[[], nn.Module], reason: str) -> None:
    model = build()
    before = list(model.modules())
    (kept,) = cp.quantize_(model).kept
    assert reason in kept.reason
    assert list(model.modules()) == before


def test_an_unknown_scheme_and_a_lone_layer_are_refused() -> None:
    with pytest.raises(OpValueError, match="Did you mean 'int8'"):
        cp.quantize_(llama(), "int4")
    with pytest.raises(OpTypeError, match=r"Int8Linear\.from_linear"):
        cp.quantize_(nn.Linear(8, 8))


def test_options_of_ops_reach_the_new_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with use_config(CompilationConfig(custom_ops="none")):
        cp.quantize_(model, enforce_enable=True)
    layer = model[0]
    assert isinstance(layer, Int8Linear)
    assert layer.decision.enabled and layer.quant.decision.enabled


def test_norms_and_gates_of_a_quantised_model_fuse_with_its_quantisation() -> None:
    config = CompilationConfig(custom_ops="none", backend="fx")
    model = llama()
    with use_config(config):
        cp.quantize_(model)
    compiled = cp.compile(model, config)
    torch.testing.assert_close(logits(compiled), logits(model), rtol=0, atol=0.02)
    matches = cp.report(compiled).matches
    assert matches["fuse_norm_quant"] == 5
    assert matches["fuse_act_quant"] == 2
    assert matches["fuse_int8_linear"] == 15
