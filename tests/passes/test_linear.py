"""``fuse_linear`` takes linear layers that this machine has a faster kernel for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilepass as cp
from compilepass.models import Target, build, next_token
from compilepass.platforms import get_platform
from compilepass.testing import expect_matches

NAME = "fuse_linear"
OF_ANY_SIZE = "+fuse_linear{smallest=0}"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}

every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])


def compiled(model: Any, *args: Tensor, **options: Any) -> tuple[Tensor, cp.Report]:
    torch._dynamo.reset()
    fast = cp.compile(model, cp.CompilationConfig(backend="fx", passes=[OF_ANY_SIZE], **options))
    with torch.no_grad():
        out = fast(*args)
    return out, cp.report(fast)


def declined(report: cp.Report) -> int:
    (found,) = [p for g in report.graphs for p in g.passes if p.name == NAME]
    return sum(rule.declined for rule in found.rules)


@every_dtype
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 64), (1, 1, 64), (2, 1, 64)], ids=str)
def test_a_token_or_two_are_taken(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(20240607)
    model, x = nn.Linear(64, 48, bias=bias, dtype=dtype), torch.randn(shape, dtype=dtype)
    out, report = compiled(model, x)
    assert report.matches[NAME] == 1
    torch.testing.assert_close(out, model(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("bias", [True, False])
def test_more_rows_are_taken_where_onednn_is_the_faster(bias: bool, dynamic: bool | None) -> None:
    torch.manual_seed(20240607)
    is_amd = get_platform("cpu").capabilities().vendor == "AuthenticAMD"
    model, x = nn.Linear(64, 48, bias=bias), torch.randn(5, 64)
    out, report = compiled(model, x, dynamic=dynamic)
    assert report.matches[NAME] == int(is_amd)
    torch.testing.assert_close(out, model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_more_rows_of_16_bits_are_left_to_pytorch(dynamic: bool | None) -> None:
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    _, report = compiled(nn.Linear(64, 48, dtype=torch.bfloat16), x, dynamic=dynamic)
    assert (report.matches[NAME], declined(report)) == (0, 1)


def test_a_weight_that_is_stored_the_other_way_is_left() -> None:
    weight = torch.randn(64, 48)

    def model(x: Tensor) -> Tensor:
        return x @ weight

    _, report = compiled(model, torch.randn(1, 64))
    assert report.matches[NAME] == 0


def test_a_weight_out_of_rows_is_left() -> None:
    weight = torch.randn(64, 48).t()

    def model(x: Tensor) -> Tensor:
        return nn.functional.linear(x, weight)

    _, report = compiled(model, torch.randn(1, 64))
    assert report.matches[NAME] == 0


def test_a_training_step_is_left() -> None:
    torch._dynamo.reset()
    fast = cp.compile(nn.Linear(64, 48), cp.CompilationConfig(backend="fx", passes=[OF_ANY_SIZE]))
    fast(torch.randn(1, 64)).sum().backward()
    assert NAME not in cp.report(fast).matches


def test_every_linear_of_a_decoding_step_is_taken() -> None:
    model, inputs = build(Target("hf:llama"))
    assert isinstance(inputs, dict)
    with torch.no_grad():
        step = next_token(model, inputs)
        fast = cp.compile(model, cp.CompilationConfig(backend="fx", passes=[OF_ANY_SIZE]))
        fast(**step)
    expect_matches(fast, {NAME: 2 * 7 + 1})


def test_a_small_weight_is_left_to_pytorch_and_told() -> None:
    layer = nn.Linear(64, 48).requires_grad_(False)
    report = cp.explain(layer, (torch.randn(1, 64),))
    assert not report.matches[NAME]
    told = [m for m in report.near_misses if m.pass_name == NAME]
    assert any(m.code == "check" and "3072 elements" in m.message for m in told)
