"""verify=True: a wrong replacement is caught by running it, named, and undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import compilepass as cp
from compilepass.kernels import native
from compilepass.reporting import PassRecord
from compilepass.rewrite import Input, Rule

from .one_rule import compile_with_rules

NORM = {"x": ("T", "H"), "weight": ("H",)}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return native.rms_norm(x, weight, eps)


def without_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return native.rms_norm(x, weight, 0.1)


def raising(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return native.rms_norm(x, weight, eps).view(-1).reshape(x.shape).contiguous()


def weight_rounded_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return native.rms_norm(x, weight, eps) * (1 + 1e-4)


def quant(x: Tensor) -> tuple[Tensor, Tensor]:
    return native.quant_int8(x)


def truncating(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return torch.trunc(x.float() / scale).clamp(-128, 127).to(torch.int8), scale


def run(
    fn: Callable[..., Any], args: tuple[Tensor, ...], rule: Rule, **config: Any
) -> tuple[Any, PassRecord]:
    with torch.no_grad():
        fast = compile_with_rules(fn, rule, verify=True, **config)
        out = fast(*args)
    (record,) = [p for p in cp.report(fast).passes if p.name == "rules_of_test"]
    return out, record


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return native.rms_norm(x, weight, 1e-6)


ARGS = (torch.randn(8, 64), torch.randn(64))


@pytest.mark.parametrize("wrong", [without_eps, weight_rounded_first])
def test_a_wrong_replacement_is_named_and_the_site_restored(wrong: Callable[..., Any]) -> None:
    out, record = run(norm, ARGS, Rule(rms_norm, wrong, NORM))
    assert (record.status, record.changes) == ("failed", 0)
    assert "rms_norm (test_verify.py" in record.reason
    assert " at mul" in record.reason
    assert "an error of at most" in record.reason and "4 times" in record.reason
    assert torch.equal(out, norm(*ARGS))


def test_strict_raises() -> None:
    with pytest.raises(Exception, match="computes another output 0"):
        run(norm, ARGS, Rule(rms_norm, without_eps, NORM), strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_right_replacement_passes(dtype: torch.dtype, dynamic: bool) -> None:
    args = tuple(a.to(dtype) for a in ARGS)
    out, record = run(norm, args, Rule(rms_norm, raising, NORM), dynamic=dynamic)
    assert (record.status, record.changes) == ("ran", 1), record.reason
    torch.testing.assert_close(out, norm(*args))


def test_integers_may_round_to_a_neighbour_but_not_all_of_them() -> None:
    x = (torch.randn(8, 64),)
    _, record = run(quant, x, Rule(quant, truncating, {"x": ("T", "H")}))
    assert record.status == "failed"
    _, record = run(quant, x, Rule(quant, quant, {"x": ("T", "H")}))
    assert (record.status, record.changes) == ("ran", 1)


def test_a_replacement_that_fails_when_it_runs_is_caught() -> None:
    @torch.library.custom_op("verify_test::fails", mutates_args=())
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("not today")

    @fails.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    rule = Rule(lambda x: torch.relu(x) * 2, lambda x: fails(x), {"x": ("T", "H")})
    x = torch.randn(8, 64)
    out, record = run(lambda x: torch.relu(x) * 2, (x,), rule)
    assert record.status == "failed" and "not today" in record.reason
    assert torch.equal(out, torch.relu(x) * 2)


def test_each_kind_of_site_is_run_once() -> None:
    calls = []

    @torch.library.custom_op("verify_test::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return torch.relu(x) * 2

    @counted.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.relu(x) * 2, torch.relu(x + 1) * 2, torch.relu(y) * 2

    rule = Rule(lambda x: torch.relu(x) * 2, lambda x: counted(x), {"x": ("T", "H")})
    with torch.no_grad():
        fast = compile_with_rules(model, rule, verify=True)
        fast(torch.randn(8, 64), torch.randn(4, 64))
    assert calls[:2] == [(8, 64), (4, 64)]
    assert len(calls) == 2 + 3


def test_quantised_inputs_are_drawn_from_their_whole_range() -> None:
    def dequantised(q: Tensor, scale: Tensor) -> Tensor:
        return q.float() * scale

    def clipped(q: Tensor, scale: Tensor) -> Tensor:
        return q.clamp(min=-100).float() * scale

    inputs = {"q": Input(("T", "H"), torch.int8), "scale": Input(("T", 1), torch.float32)}
    args = (torch.ones(8, 64, dtype=torch.int8), torch.randn(8, 1))
    _, record = run(dequantised, args, Rule(dequantised, clipped, inputs))
    assert record.status == "failed"
