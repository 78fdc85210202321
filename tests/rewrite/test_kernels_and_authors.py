"""Refusals that come from kernels and from the authors of rules; none of them leaves a compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import compilepass as cp
from compilepass.kernels import define, native, provider
from compilepass.rewrite import REJECT_CODES, Rule

from . import test_hand_made_graphs, test_refusals
from .one_rule import apply, compile_with_rules

ROWS = {"x": ("T", "H"), "y": ("T", "H")}


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


def fussy(x: Tensor, y: Tensor) -> str | None:
    return None if x.shape[-1] % 64 == 0 else "64 columns at a time"


def broken(x: Tensor, y: Tensor) -> str | None:
    raise RuntimeError("cannot tell")


for _name in ("absent", "fussy", "broken"):
    define(f"refusal_test::{_name}(Tensor x, Tensor y) -> Tensor", native=add_relu)
for _name, _predicate in (("fussy", fussy), ("broken", broken)):
    provider(
        f"refusal_test::{_name}",
        name="mine",
        device_type="cpu",
        load=lambda: add_relu,
        supports=_predicate,
    )
define(
    "refusal_test::add_into(Tensor(a!) out, Tensor x) -> ()",
    native=lambda out, x: out.add_(x) and None,
    fake=lambda out, x: None,
)


def calling(name: str) -> Rule:
    op = getattr(torch.ops.refusal_test, name)
    return Rule(add_relu, lambda x, y: op(x, y), ROWS, name=name)


@pytest.mark.parametrize(
    ("name", "width", "code", "reason"),
    [
        ("absent", 64, "kernel_unavailable", "no kernel is registered for cpu"),
        ("fussy", 48, "kernel_declined", "mine: 64 columns at a time"),
    ],
)
def test_a_kernel_that_does_not_take_the_site_is_counted_as_declined(
    name: str, width: int, code: str, reason: str
) -> None:
    x, y = torch.randn(8, width), torch.randn(8, width)
    applied = apply(add_relu, (x, y), calling(name))
    assert applied.unchanged
    assert (applied.result.declined, applied.result.refused) == (1, 0)
    assert applied.near is not None and applied.near.code == code
    assert reason in applied.near.message
    torch.testing.assert_close(applied.output, add_relu(x, y))


def test_a_kernel_that_takes_the_site_is_used() -> None:
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    assert apply(add_relu, (x, y), calling("fussy")).result.count == 1


def test_a_predicate_that_raises_is_a_refusal() -> None:
    applied = apply(add_relu, (torch.randn(8, 64), torch.randn(8, 64)), calling("broken"))
    assert applied.near is not None and applied.near.code == "error"
    assert "cannot tell" in applied.near.message


def test_a_kernel_that_only_writes_is_a_mutation() -> None:
    def replacement(x: Tensor, y: Tensor) -> Tensor:
        torch.ops.refusal_test.add_into(x, y)
        return torch.relu(x)

    x, y = torch.randn(8, 64), torch.randn(8, 64)
    applied = apply(add_relu, (x, y), Rule(add_relu, replacement, ROWS))
    assert applied.near is not None and applied.near.code == "mutation"
    assert applied.unchanged
    torch.testing.assert_close(applied.output, add_relu(x, y))


def test_a_part_of_a_fused_kernel_is_no_near_miss() -> None:
    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return native.rms_norm(x, weight, eps)

    op = torch.ops.compilepass.fused_add_rms_norm
    rule = Rule(norm, norm, {"x": ("T", "H"), "weight": ("H",)})
    args = (torch.randn(8, 64), torch.randn(8, 64), torch.ones(64))
    # without its second output, the sum is nowhere but in the kernel
    applied = apply(lambda x, r, w: op(x, r, w, 1e-6)[0], args, rule)
    assert applied.result.refusals == {"partial_kernel": 1}
    assert (applied.result.refused, applied.result.candidates) == (0, 0)
    assert applied.near is None


def untraceable(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y) if x.sum() > 0 else x


def not_there(x: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten.no_such_operation(x, y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("pattern", [untraceable, not_there])
def test_a_pattern_that_cannot_be_traced_fails_its_pass_and_no_other_rule(pattern: object) -> None:
    bad = Rule(pattern, add_relu, ROWS)  # type: ignore[arg-type]
    good = Rule(add_relu, lambda x, y: torch.clamp_min(x + y, 0.0), ROWS)
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    with torch.no_grad():
        fast = compile_with_rules(add_relu, bad, good)
        torch.testing.assert_close(fast(x, y), add_relu(x, y))
    (record,) = [p for p in cp.report(fast).passes if p.name == "rules_of_test"]
    assert (record.status, record.changes) == ("failed", 1)
    assert bad.name in record.reason


def test_strict_raises_what_the_rule_did() -> None:
    bad = Rule(untraceable, add_relu, ROWS)
    with torch.no_grad(), pytest.raises(Exception, match="untraceable"):
        compile_with_rules(add_relu, bad, strict=True)(torch.randn(8, 64), torch.randn(8, 64))


def test_a_graph_with_backward_is_left_alone_and_says_what_it_would_be() -> None:
    rule = Rule(add_relu, lambda x, y: torch.clamp_min(x + y, 0.0), ROWS)
    x, y = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64)
    fast = compile_with_rules(add_relu, rule)
    fast(x, y).sum().backward()
    found = cp.report(fast)
    (record,) = [p for p in found.passes if p.name == "rules_of_test"]
    assert (record.status, record.changes) == ("skipped", 0)
    (near,) = found.near_misses
    assert (near.code, near.matched, near.wanted) == ("training", 2, 2)
    reference = x.detach().requires_grad_()
    add_relu(reference, y).sum().backward()
    torch.testing.assert_close(x.grad, reference.grad)


def test_a_rule_for_training_runs_beside_one_for_inference() -> None:
    inference = Rule(add_relu, add_relu, ROWS, name="inference")
    training = Rule(
        lambda x: torch.sin(x) * 2, lambda x: 2 * torch.sin(x), {"x": ("T", "H")}, training=True
    )
    x = torch.randn(8, 64, requires_grad=True)
    fast = compile_with_rules(lambda x, y: torch.sin(add_relu(x, y)) * 2, inference, training)
    fast(x, torch.randn(8, 64)).sum().backward()
    found = cp.report(fast)
    assert found.matches["rules_of_test"] >= 1
    assert "training" in {n.code for n in found.near_misses}


def test_every_code_is_produced_by_a_test() -> None:
    here = {"kernel_unavailable", "kernel_declined", "error", "mutation", "partial_kernel"}
    here |= {"training"}
    cases = {case.code for case in test_refusals.CASES}
    by_hand = {"extra_user", "mutation", "device"}
    assert test_hand_made_graphs.refused  # where these are asserted
    elsewhere = {"numerics"}  # test_verify
    assert here | cases | by_hand | elsewhere >= set(REJECT_CODES)


def test_a_replacement_is_decomposed_as_the_compiler_needs_it() -> None:
    """Inductor decomposes before the passes run and lowers neither of these after them."""

    def turned(x: Tensor, y: Tensor) -> Tensor:
        return F.gelu((x + y).transpose(0, 1)).transpose(0, 1)

    rule = Rule(lambda x, y: torch.relu(x + y), turned, {"x": ("T", "H"), "y": ("T", "H")})
    applied = apply(lambda x, y: torch.relu(x + y), (torch.randn(8, 64), torch.randn(8, 64)), rule)
    assert applied.result.count == 1
    called = {n.target for n in applied.graph.nodes if n.op == "call_function"}
    assert called.isdisjoint({torch.ops.aten.transpose.int, torch.ops.aten.gelu.default})
