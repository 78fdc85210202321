"""The linear layers with quantised weights as stand-ins for nn.Linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compilepass.config import CompilationConfig, use_config
from compilepass.layers import Fp8Linear, Int8Linear, WeightOnlyInt8Linear

from .cases import under

# Of a product of standard normal inputs against fp32: half a step of 254 in each int8 factor.
# fp8 has half a step of 8 in each factor, of values that are nearest to the upper end.
RELATIVE_ERROR = {Int8Linear: 0.02, WeightOnlyInt8Linear: 0.01, Fp8Linear: 0.06}
every_layer = pytest.mark.parametrize("layer_class", RELATIVE_ERROR)


@pytest.mark.parametrize("policy", ["none", "all"])
@pytest.mark.parametrize("bias", [True, False])
@every_layer
def test_it_is_near_the_linear_it_was_made_from(layer_class: Any, policy: str, bias: bool) -> None:
    linear = nn.Linear(256, 64, bias=bias)
    layer = under(policy, lambda: layer_class.from_linear(linear))
    x = torch.randn(9, 256)
    wanted = linear(x)
    assert (layer.bias is not None) == bias
    assert (layer(x) - wanted).norm() < RELATIVE_ERROR[layer_class] * wanted.norm()


def test_a_weight_that_int8_holds_exactly_is_kept_exactly() -> None:
    linear = nn.Linear(8, 3)
    steps = torch.randint(-127, 128, (3, 8)).float()
    steps[:, 0] = 127
    linear.weight.data = steps * 0.5
    layer = Int8Linear.from_linear(linear)
    assert torch.equal(layer.weight.float(), steps)
    assert torch.equal(layer.weight_scale, torch.full((3,), 0.5))


@every_layer
def test_the_weights_are_state_and_not_trained(layer_class: Any) -> None:
    layer, other = layer_class.from_linear(nn.Linear(8, 3)), layer_class(8, 3)
    assert sorted(layer.state_dict()) == ["bias", "weight", "weight_scale"]
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    other.load_state_dict(layer.state_dict())
    x = torch.randn(4, 8)
    assert torch.equal(other(x), layer(x))


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_layer
def test_a_model_cast_to_another_dtype_still_multiplies(
    layer_class: Any, dtype: torch.dtype, policy: str
) -> None:
    layer = under(policy, lambda: layer_class.from_linear(nn.Linear(64, 16)))
    x = torch.randn(4, 64)
    wanted, weight = layer(x), layer.weight.clone()
    found = layer.to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    assert torch.equal(layer.weight.float(), weight.float()) and layer.weight.dtype == weight.dtype
    assert (found - wanted).norm() < RELATIVE_ERROR[layer_class] * wanted.norm()
