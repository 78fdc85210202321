"""What holds for every op that ships."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compilepass.config import CompilationConfig, use_config
from compilepass.layers import (
    FastGELU,
    FatreluAndMul,
    GeluAndMul,
    GemmaRMSNorm,
    Int8Linear,
    LayerNorm,
    MRotaryEmbedding,
    MulAndSilu,
    NewGELU,
    QKNormRope,
    QuantInt8,
    QuickGELU,
    ReLUSquaredActivation,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
    SwigluOAIAndMul,
)
from compilepass.ops import describe

from .cases import CASES, FP64_ATOL, FP64_RTOL, Case, cast, outputs, under

ops = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# One rounding of the input to bf16 can move a quantised value by a step, so these are fp32 only.
QUANTISED = {"quant_int8", "int8_linear"}


@ops
@pytest.mark.parametrize("policy", ["none", "all"])
def test_an_op_computes_what_fp64_says(case: Case, policy: str) -> None:
    op, args = under(policy, case.build), case.inputs()
    wanted = outputs(case.oracle(op, *cast(args, torch.float64)))
    found = outputs(op(*args))
    assert len(found) == len(wanted)
    for mine, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            mine.double(), exact, rtol=FP64_RTOL[torch.float32], atol=FP64_ATOL[torch.float32]
        )


@pytest.mark.parametrize("name", sorted(CASES.keys() - QUANTISED))
@pytest.mark.parametrize("policy", ["none", "all"])
def test_an_op_in_bf16_computes_what_fp64_says(name: str, policy: str) -> None:
    dtype, case = torch.bfloat16, CASES[name]
    op = under(policy, case.build).to(dtype)
    args = cast(case.inputs(), dtype)
    wanted = outputs(case.oracle(op, *cast(args, torch.float64)))
    for mine, exact in zip(outputs(op(*args)), wanted, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(
            mine.double(), exact, rtol=FP64_RTOL[dtype], atol=FP64_ATOL[dtype]
        )


@ops
@pytest.mark.parametrize("leading", [(), (2, 3)], ids=["no leading dim", "two leading dims"])
def test_an_op_takes_any_leading_dims(case: Case, leading: tuple[int, ...]) -> None:
    args = case.inputs()
    if leading:
        shaped = case.per_token(args, lambda a: a[:1].expand(6, *a.shape[1:]).unflatten(0, leading))
    else:
        shaped = case.per_token(args, lambda a: a[0])
    op = under("all", case.build)
    for batched, rows in zip(outputs(op(*shaped)), outputs(op(*args)), strict=True):
        expected = rows[0].expand(*leading, *rows.shape[1:])
        torch.testing.assert_close(batched, expected, rtol=1e-6, atol=1e-6)


def _gradients(op: Any, call: Any, args: tuple[Tensor, ...]) -> list[Tensor | None]:
    op.zero_grad()
    leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    floating = [out for out in outputs(call(*leaves)) if out.is_floating_point()]
    torch.autograd.backward(sum((out.square().sum() for out in floating), torch.zeros(())))
    return [t.grad for t in (*leaves, *op.parameters())]


@ops
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_of_an_enabled_op_are_those_of_native(case: Case, compiled: bool) -> None:
    native, enabled = under("none", case.build), under("all", case.build)
    enabled.load_state_dict(native.state_dict())
    call = torch.compile(enabled, backend="aot_eager", fullgraph=True) if compiled else enabled
    args = case.inputs()
    wanted, found = _gradients(native, native, args), _gradients(enabled, call, args)
    assert any(grad is not None for grad in wanted)
    for mine, expected in zip(found, wanted, strict=True):
        assert (mine is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(mine, expected)


@ops
@pytest.mark.parametrize("policy", ["none", "all"])
def test_an_op_compiles_as_one_graph_with_dynamic_tokens(case: Case, policy: str) -> None:
    op, args = under(policy, case.build), case.inputs()
    torch.compiler.reset()
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (5, 4):
            some = case.per_token(args, lambda a: a[:rows])  # noqa: B023
            torch.testing.assert_close(compiled(*some), op(*some))


@ops
def test_a_copy_has_weights_of_its_own_and_the_same_decision(case: Case) -> None:
    op, args = under("all", case.build), case.inputs()
    before = op(*args)
    for copied in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        torch.testing.assert_close(copied(*args), before, rtol=0, atol=0)
        assert copied.decision == op.decision
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        torch.testing.assert_close(op(*args), before, rtol=0, atol=0)


@ops
def test_state_moves_from_one_op_to_another(case: Case) -> None:
    first, second, args = under("none", case.build), under("none", case.build), case.inputs()
    assert not {"cos", "sin"} & first.state_dict().keys()
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second(*args), first(*args), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_the_policy_names_each_op(name: str) -> None:
    word = name.partition("/")[0]
    config = CompilationConfig(custom_ops=["none", f"+{word}"])
    with use_config(config):
        op = CASES[name].build()
    assert op.decision.method == "forward_cpu"
    assert config.enabled_custom_ops == {word: 1}
    assert under(f"all,-{word}", CASES[name].build).decision.method == "forward_native"


@pytest.mark.parametrize(
    "build",
    [
        lambda **options: RMSNorm(16, **options),
        SiluAndMul,
        GeluAndMul,
        lambda **options: RotaryEmbedding(8, 32, **options),
        lambda **options: MRotaryEmbedding(8, 32, (1, 3), **options),
        lambda **options: QKNormRope(8, 32, **options),
        lambda **options: GemmaRMSNorm(16, **options),
        lambda **options: LayerNorm(16, **options),
        MulAndSilu,
        FatreluAndMul,
        SwigluOAIAndMul,
        NewGELU,
        FastGELU,
        QuickGELU,
        ReLUSquaredActivation,
        QuantInt8,
        lambda **options: Int8Linear.from_linear(nn.Linear(32, 12), **options),
    ],
)
def test_an_option_enables_an_op_whatever_the_policy_says(build: Callable[..., Any]) -> None:
    op = under("none", lambda: build(enforce_enable=True))
    assert op.decision.method == "forward_cpu"
    assert "forward_native: the op is enabled" in str(describe(op))


WITHOUT_A_COMPILER = """
import torch
from compilepass.config import CompilationConfig, use_config
from compilepass.kernels import find
from compilepass.layers import *

def results():
    x, heads = torch.linspace(-3, 3, 64).view(4, 16), torch.linspace(0, 1, 32).view(4, 1, 8)
    yield RMSNorm(16)(x)
    yield RMSNorm(16)(x, x)
    yield SiluAndMul()(x)
    yield GeluAndMul()(x)
    yield QuantInt8()(x)
    yield from (LayerNorm(16)(x), GemmaRMSNorm(16)(x), SwigluOAIAndMul()(x), QuickGELU()(x))
    yield QKNormRope(8, 4)(torch.arange(4), heads, heads)
    yield Int8Linear(16, 3)(x)
    yield RotaryEmbedding(8, 4)(torch.arange(4), heads, heads)

def under(policy):
    with use_config(CompilationConfig(custom_ops=policy)):
        return list(results())

torch.testing.assert_close(under("all"), under("none"), rtol=0, atol=0)
print(find("compilepass::rms_norm").available("cpu").ok)
"""


def test_enabled_ops_run_native_where_no_kernel_can_be_built() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER],
        env={**os.environ, "COMPILEPASS_NO_CPP": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "False", done.stderr


def test_ops_inside_a_model_survive_moves_between_dtypes() -> None:
    model = nn.Sequential(*(under("all", CASES[n].build) for n in ("rms_norm", "quant_int8")))
    q, scale = model.to(torch.bfloat16)(torch.randn(3, 16, dtype=torch.bfloat16))
    assert (q.dtype, scale.dtype) == (torch.int8, torch.float32)
