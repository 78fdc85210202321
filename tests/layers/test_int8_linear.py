"""Int8Linear as a stand-in for nn.Linear."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compilepass.config import CompilationConfig, use_config
from compilepass.layers import Int8Linear

from .cases import under

# Of an int8 product of standard normal inputs against fp32: half a step of 254 in each factor.
INT8_RELATIVE_ERROR = 0.02


@pytest.mark.parametrize("policy", ["none", "all"])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_near_the_linear_it_was_made_from(policy: str, bias: bool) -> None:
    linear = nn.Linear(256, 64, bias=bias)
    layer = under(policy, lambda: Int8Linear.from_linear(linear))
    x = torch.randn(9, 256)
    wanted = linear(x)
    assert (layer.bias is not None) == bias
    assert (layer(x) - wanted).norm() < INT8_RELATIVE_ERROR * wanted.norm()


def test_a_weight_that_int8_holds_exactly_is_kept_exactly() -> None:
    linear = nn.Linear(8, 3)
    steps = torch.randint(-127, 128, (3, 8)).float()
    steps[:, 0] = 127
    linear.weight.data = steps * 0.5
    layer = Int8Linear.from_linear(linear)
    assert torch.equal(layer.weight.float(), steps)
    assert torch.equal(layer.weight_scale, torch.full((3,), 0.5))


def test_the_weights_are_state_and_not_trained() -> None:
    layer = Int8Linear.from_linear(nn.Linear(8, 3))
    assert sorted(layer.state_dict()) == ["bias", "weight", "weight_scale"]
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


def test_a_channel_of_zeros_stays_zero() -> None:
    linear = nn.Linear(8, 3, bias=False)
    nn.init.zeros_(linear.weight)
    assert torch.equal(Int8Linear.from_linear(linear)(torch.randn(2, 8)), torch.zeros(2, 3))


def test_the_quantisation_of_its_input_has_a_policy_word_of_its_own() -> None:
    config = CompilationConfig(custom_ops=["none", "+int8_linear"])
    with use_config(config):
        Int8Linear(8, 3)
    assert config.enabled_custom_ops == {"int8_linear": 1}
    assert config.disabled_custom_ops == {"quant_int8": 1}


@pytest.mark.parametrize("policy", ["none", "all"])
def test_a_model_cast_to_bf16_still_multiplies(policy: str) -> None:
    layer = under(policy, lambda: Int8Linear.from_linear(nn.Linear(64, 16)))
    x = torch.randn(4, 64)
    wanted = layer(x)
    found = layer.to(torch.bfloat16)(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found - wanted).norm() < INT8_RELATIVE_ERROR * wanted.norm()
