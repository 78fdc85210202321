"""Models quantised by torchao: their linear layers become calls of int8 kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilepass as cp
from compilepass.comparison import TOLERANCES
from compilepass.testing import expect_matches

torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

FX = cp.CompilationConfig(backend="fx")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = {"rows": (5, 64), "batch": (2, 3, 64), "token": (1, 1, 64)}
#: torchao's name, the pass that takes its layers, and the one that has nothing to take
CONFIGS = {
    "weight_only": ("Int8WeightOnlyConfig", "fuse_weight_only_linear", "fuse_int8_linear"),
    "dynamic": (
        "Int8DynamicActivationInt8WeightConfig",
        "fuse_int8_linear",
        "fuse_weight_only_linear",
    ),
}


def mlp(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 96, bias), nn.SiLU(), nn.Linear(96, 32, bias)
    return nn.Sequential(*layers).eval().requires_grad_(False)


def quantised(model: nn.Module, name: str) -> nn.Module:
    # it would set options of Inductor for the whole process
    config = getattr(torchao, CONFIGS[name][0])(set_inductor_config=False)
    torchao.quantize_(model, config)
    return model


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def within_bound(model: nn.Module, exact: nn.Module, x: Tensor, counts: dict[str, int]) -> None:
    """Of eager, compiled without passes and with them, the last errs no more than the others."""
    fast = cp.compile(model, FX)
    unfused = cp.compile(model, FX.model_copy(update={"passes": ["none"]}))
    with torch.no_grad():
        wanted = exact(x.double())
        eager, plain, fused = (error(fn(x), wanted) for fn in (model, unfused, fast))
    expect_matches(fast, counts)
    floor = TOLERANCES[str(x.dtype).removeprefix("torch.")]
    assert fused <= 2 * max(eager, plain) + floor


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_linear_is_taken_within_the_bound(
    name: str, dtype: torch.dtype, shape: str, bias: bool
) -> None:
    model = quantised(mlp(bias).to(dtype), name)
    exact = mlp(bias).to(dtype).double()
    for mine, theirs in zip(model.modules(), exact.modules(), strict=True):
        if isinstance(theirs, nn.Linear):
            weight: Any = mine.weight
            theirs.weight.data = weight.dequantize().double()
    _, taken, other = CONFIGS[name]
    within_bound(model, exact, torch.randn(SHAPES[shape]).to(dtype), {taken: 2, other: 0})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_model_with_dynamic_shapes(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    quantised(model, name)
    tokens = torch.arange(12).view(2, 6)
    fast: Any = cp.compile(model, FX.model_copy(update={"dynamic": True}))
    with torch.no_grad():
        logits, wanted = fast(tokens).logits, model(tokens).logits
    # all but the head, which torchao quantises too where it is a linear layer of its own
    linears = sum(isinstance(m, nn.Linear) for m in model.modules())
    assert linears == 15
    expect_matches(fast, {CONFIGS[name][1]: linears})
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-2 * float(wanted.abs().max()))


def pt2e(model: nn.Module, x: Tensor, dynamic: bool) -> nn.Module:
    """By PyTorch's quantisation of exported programs, which torchao took over."""
    steps = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    prepared = steps.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    converted: nn.Module = steps.convert_pt2e(prepared)
    return converted


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_a_program_that_pt2e_quantised_reads_int8_weights(dynamic: bool, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64)
    model = pt2e(mlp(bias), x, dynamic)
    fast = cp.compile(model, FX)
    with torch.no_grad():
        found, wanted = fast(x), model(x)
    expect_matches(fast, {"fuse_weight_only_linear": 2, "fuse_int8_linear": 0})
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_zero_points_of_weights_are_not_taken_for_zeros() -> None:
    x = torch.randn(2, 3, 64)
    model = pt2e(mlp(), x, dynamic=False)
    moved: Any = copy.deepcopy(model)
    points = [b for name, b in moved.named_buffers() if "zero_point" in name and b.dim()]
    assert points
    for point in points:
        point.copy_(torch.arange(point.numel()) % 7 - 3)
    fast = cp.compile(moved, FX)
    with torch.no_grad():
        found, wanted, other = fast(x), moved(x), model(x)
    expect_matches(fast, {"fuse_weight_only_linear": 2})
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, other, rtol=1e-2, atol=1e-2)
