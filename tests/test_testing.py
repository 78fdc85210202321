"""The helpers accept what is right and, above all, refuse what is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compilepass.passes.fusion.norm_quant import FuseNormQuant
from torch import Tensor, nn

import compilepass as cp
from compilepass.kernels import native
from compilepass.layers import Int8Linear, QuantInt8, RMSNorm
from compilepass.oracle import run_in_float64
from compilepass.reporting import Report
from compilepass.testing import (
    Comparison,
    OutputError,
    Variant,
    assert_compiled_close,
    check_pass,
    check_rule,
    compare,
    expect_matches,
    graph_of,
)

SEED = 20250211
FX = cp.CompilationConfig(backend="fx", custom_ops=["none"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    print(f"seed: {SEED}")
    torch.manual_seed(SEED)


class NormQuant(nn.Module):
    """A site of fuse_norm_quant."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm, self.quant = RMSNorm(32, dtype=dtype), QuantInt8()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quantised: tuple[Tensor, Tensor] = self.quant(self.norm(x))
        return quantised


def norm_quant(dtype: torch.dtype = torch.float32, config: Any = FX) -> nn.Module:
    with cp.use_config(config):
        return NormQuant(dtype).requires_grad_(False)


def silu(x: Tensor) -> Tensor:
    return F.silu(x)


def right(x: Tensor) -> Tensor:
    return x * (torch.tanh(x / 2) + 1) / 2


def wrong(x: Tensor) -> Tensor:
    return x * (torch.tanh(x / 2.001) + 1) / 2


def rule(replacement: Any) -> cp.Rule:
    return cp.Rule(silu, replacement, {"x": ("T", "H")})


class Rewrite(cp.FusionPass):
    """Replaces silu, rightly or wrongly."""

    name = "rewrite_silu"
    replacement: Any = wrong

    def rules(self, ctx: cp.PassContext) -> Sequence[cp.Rule]:
        return [rule(self.replacement)]


# float64


def test_the_oracle_computes_in_float64_what_the_model_computes_in_fp32() -> None:
    norm, x = norm_quant().norm, torch.randn(4, 32)
    wide, weight = x.double(), norm.weight.double()
    exact = weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    oracle = run_in_float64(norm, (x,), {})
    torch.testing.assert_close(oracle, exact, rtol=1e-15, atol=1e-15)
    assert not torch.equal(norm.double()(wide), oracle)  # .double() alone still rounds to fp32


@pytest.mark.parametrize("policy", ["none", "all"])
def test_the_oracle_uses_the_weights_and_scales_of_an_int8_layer(policy: str) -> None:
    with cp.use_config(cp.CompilationConfig(custom_ops=policy)):
        layer = Int8Linear.from_linear(nn.Linear(32, 8, dtype=torch.bfloat16))
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    q, scale = run_in_float64(native.quant_int8, (x,), {})
    assert q.dtype is torch.int8
    exact = q.double() @ layer.weight.double().T * scale * layer.weight_scale.double()
    oracle = run_in_float64(layer, (x,), {})
    torch.testing.assert_close(oracle, exact + layer.bias.double(), rtol=1e-14, atol=1e-14)
    assert layer.weight_scale.dtype is torch.float32


def test_fused_kernels_and_weights_of_a_closure_are_widened_too() -> None:
    weight, x = torch.rand(32), torch.randn(4, 32)
    oracle = run_in_float64(lambda x: torch.ops.compilepass.rms_norm(x, weight, 1e-6), (x,), {})
    torch.testing.assert_close(
        oracle, run_in_float64(native.rms_norm, (x, weight, 1e-6), {}), rtol=0, atol=0
    )
    assert oracle.dtype is torch.float64


def test_a_model_without_a_float64_form_is_named() -> None:
    def reads_bits(x: Tensor) -> Tensor:
        return x.view(torch.int32) + 1

    with pytest.raises(cp.CompilePassError, match="function cannot be run in float64") as caught:
        compare(reads_bits, (torch.randn(3),), FX)
    assert "reads the bits" in str(caught.value)


# compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_right_fusion_is_close(dtype: torch.dtype) -> None:
    found = assert_compiled_close(norm_quant(dtype), (torch.randn(8, 32, dtype=dtype),), FX)
    expect_matches(found, fuse_norm_quant=1)
    assert [e.dtype for e in found.fused.errors] == ["int8", "float32"]
    assert "within bounds" in str(found)
    assert len(found.fused.run()) == 2


def test_a_wrong_replacement_is_not_close() -> None:
    config = FX.model_copy()
    config.register_pass(Rewrite)
    with pytest.raises(AssertionError, match=r"output \(float32\): relative error"):
        assert_compiled_close(lambda x: F.silu(x), (torch.randn(4, 8),), config)


def test_inputs_may_be_keywords_and_outputs_dataclasses() -> None:
    @dataclass
    class Out:
        y: Tensor
        parts: dict[str, Tensor]

    torch.utils._pytree.register_dataclass(Out)

    def model(x: Tensor, by: Tensor) -> Out:
        return Out(F.silu(x) * by, {"codes": (x > 0).to(torch.int8)})

    found = compare(model, {"x": torch.randn(4, 8), "by": torch.rand(8)}, FX)
    assert [e.output for e in found.eager.errors] == ["y", "parts.codes"]


def test_the_model_and_its_inputs_are_left_as_they_are() -> None:
    def model(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    x = torch.zeros(3)
    compare(model, (x,), FX)
    assert torch.equal(x, torch.zeros(3))


def test_a_model_that_is_random_is_refused() -> None:
    with pytest.raises(cp.CompilePassError, match="called again"):
        compare(nn.Dropout(0.5), (torch.ones(64),), FX)


def test_a_single_tensor_is_no_tuple_of_inputs() -> None:
    with pytest.raises(cp.CompilePassError, match=r"Write \(x,\)"):
        compare(silu, torch.ones(3), FX)  # type: ignore[arg-type]


def test_a_function_without_graph_is_refused() -> None:
    with pytest.raises(cp.CompilePassError, match="compiled no graph"):
        compare(lambda x: x, (torch.ones(3),), FX)


def test_expect_of_the_config_is_an_assertion_error() -> None:
    with pytest.raises(cp.ExpectationError, match="matched 1 time, and expect says 0"):
        compare(
            norm_quant(),
            (torch.randn(4, 32),),
            FX.model_copy(update={"expect": {"fuse_norm_quant": 0}}),
        )


def test_many_comparisons_of_one_function_are_all_compiled() -> None:
    """Dynamo stops compiling a function for its ninth backend, without a word to the caller."""
    for _ in range(6):
        assert compare(silu, (torch.randn(4, 8),), FX).report.graphs


def comparison(eager: float, unfused: float, fused: float, **of_fused: Any) -> Comparison:
    def variant(name: str, relative: float, **more: Any) -> Variant:
        fields = {"output": "y", "dtype": "float32", "absolute": 0.0, "relative": relative, **more}
        return Variant(name, (OutputError(**fields),), lambda: None)

    return Comparison(
        variant("eager", eager), variant("u", unfused), variant("f", fused, **of_fused), Report()
    )


@pytest.mark.parametrize(
    ("found", "factor", "ok"),
    [
        (comparison(1e-3, 0, 2e-3), 2.0, True),
        (comparison(0, 1e-3, 2e-3), 2.0, True),
        (comparison(1e-3, 1e-3, 2.1e-3), 2.0, False),
        (comparison(1e-3, 1e-3, 2.1e-3), 3.0, True),
        (comparison(0, 0, 9e-7), 2.0, True),  # the floor
        (comparison(0, 0, 2e-6), 2.0, False),
        (comparison(1e-3, 0, math.nan), 2.0, False),
        (comparison(math.inf, 0, math.inf), 2.0, True),
        (comparison(1, 1, 1, dtype="bfloat16"), 2.0, False),
        (comparison(0, 0, 0, mismatches=1), 2.0, False),
    ],
)
def test_the_bound(found: Comparison, factor: float, ok: bool) -> None:
    assert found.ok(factor) is ok
    assert bool(found.failures(factor)) is not ok


# counts


def test_expect_matches_says_why_there_is_no_match() -> None:
    def uses_the_norm_twice(x: Tensor, weight: Tensor) -> Any:
        normed = native.rms_norm(x, weight, 1e-6)
        return native.quant_int8(normed), normed

    fast = cp.compile(uses_the_norm_twice, FX)
    with torch.no_grad():
        fast(torch.randn(4, 32), torch.rand(32))
    expect_matches(fast, {"fuse_norm_quant": 0}, fuse_act_quant=0)
    with pytest.raises(AssertionError, match="1 were expected") as caught:
        expect_matches(fast, fuse_norm_quant=1)
    assert "extra_user" in str(caught.value)
    with pytest.raises(cp.ConfigError, match="Did you mean 'fuse_norm_quant'"):
        expect_matches(fast, fuse_norm_quat=1)


# graphs


def test_graph_of_is_the_graph_after_the_passes() -> None:
    graph = graph_of(norm_quant(), (torch.randn(4, 32),), FX).graph
    fused = torch.ops.compilepass.rms_norm_dynamic_int8_quant.default
    assert [n.target for n in graph.nodes].count(fused) == 1


def test_graph_of_wants_one_graph() -> None:
    def broken(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    with pytest.raises(AssertionError, match="2 graphs, not one"):
        graph_of(broken, (torch.ones(3),), FX)


# passes


def test_check_pass_checks_a_shipped_pass() -> None:
    check_pass(
        FuseNormQuant,
        norm_quant(),
        (torch.randn(4, 32),),
        changes=1,
        gone=[torch.ops.aten.rsqrt, "aten::round"],
        new=["compilepass.rms_norm_dynamic_int8_quant.default"],
    )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"changes": 2}, "matched 1 time, and 2 were expected"),
        ({"changes": 1, "gone": ["aten.sin"]}, "aten.sin was not in the graph before"),
        ({"changes": 1, "gone": ["aten.mul"]}, "aten.mul is still in the graph"),
        ({"changes": 1, "new": ["aten.mul"]}, "aten.mul was in the graph before"),
        ({"changes": 1, "new": ["aten.sin"]}, "aten.sin is not in the graph"),
    ],
)
def test_check_pass_says_what_is_not_as_expected(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_pass(Rewrite(right), lambda x: F.silu(x) * x, (torch.randn(4, 8),), **wanted)


def test_check_pass_refuses_a_wrong_pass() -> None:
    check_pass(Rewrite(right), silu, (torch.randn(4, 8),), changes=1)
    with pytest.raises(AssertionError, match="out of bound"):
        check_pass(Rewrite(wrong), silu, (torch.randn(4, 8),), changes=1)


class AlwaysChanging(cp.Pass):
    name = "always_changing"

    def run(self, graph: torch.fx.Graph, ctx: cp.PassContext) -> int:
        return 1


class Raising(cp.Pass):
    name = "raising"

    def run(self, graph: torch.fx.Graph, ctx: cp.PassContext) -> int:
        raise ValueError("no")


def test_check_pass_refuses_a_pass_that_never_ends() -> None:
    with pytest.raises(AssertionError, match="a second run changes the graph 1 more times"):
        check_pass(AlwaysChanging, silu, (torch.randn(4, 8),), changes=1)


def test_check_pass_refuses_a_pass_that_raises() -> None:
    with pytest.raises(AssertionError, match="failed: ValueError: no"):
        check_pass(Raising, silu, (torch.randn(4, 8),), changes=0)


# rules


def test_check_rule_accepts_the_right_replacement_only() -> None:
    check_rule(rule(right), {"x": torch.randn(4, 8)})
    with pytest.raises(AssertionError, match="out of bound"):
        check_rule(rule(wrong), [torch.randn(4, 8)])


def test_check_rule_binds_numbers() -> None:
    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return native.rms_norm(x, weight, eps)

    def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.ops.compilepass.rms_norm(x, weight, eps)  # type: ignore[no-any-return]

    made = cp.Rule(norm, fused, {"x": ("T", "H"), "weight": ("H",)})
    check_rule(made, (torch.randn(4, 8), torch.rand(8), 1e-3))
    with pytest.raises(cp.CompilePassError, match="Its pattern takes x, weight, eps"):
        check_rule(made, (torch.randn(4, 8), torch.rand(8)))


def test_check_rule_says_that_the_pattern_is_not_found() -> None:
    refused = cp.Rule(silu, right, {"x": ("T", "H")}, check=lambda m: m.reject("not today"))
    with pytest.raises(AssertionError, match="not today"):
        check_rule(refused, [torch.randn(4, 8)])


# with generated code


@pytest.mark.slow
def test_precision_casts_are_emulated_in_both_compiled_forms() -> None:
    config = cp.CompilationConfig(custom_ops=["none"])
    model = norm_quant(torch.bfloat16, config)
    found = assert_compiled_close(
        model, (torch.randn(8, 32, dtype=torch.bfloat16),), config, emulate_precision_casts=True
    )
    expect_matches(found, fuse_norm_quant=1)
    assert found.unfused.name == "torch.compile"
    assert found.unfused.errors == found.eager.errors
