"""The lint of rules: planted cases are found, and the shipped plan is clean."""

from __future__ import annotations

import torch
from torch import Tensor

import compilepass as cp
from compilepass import inductor
from compilepass.kernels import define, native
from compilepass.passmanager import Finding, FusionPass, PassContext, lint_rules
from compilepass.rewrite import Rule

NORM = {"x": ("T", "H"), "weight": ("H",)}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return native.rms_norm(x, weight, eps)


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return native.quant_int8(native.rms_norm(x, weight, eps))


# an op that the engine knows nothing about, and one that it reads as its native form
torch.library.define("lint_test::opaque_norm", "(Tensor x, Tensor weight, float eps) -> Tensor")
torch.library.register_fake("lint_test::opaque_norm", lambda x, weight, eps: torch.empty_like(x))
define("lint_test::norm(Tensor x, Tensor weight, float eps) -> Tensor", native=rms_norm)

OPAQUE = Rule(
    rms_norm, lambda x, weight, eps: torch.ops.lint_test.opaque_norm(x, weight, eps), NORM
)
KNOWN = Rule(rms_norm, lambda x, weight, eps: torch.ops.lint_test.norm(x, weight, eps), NORM)
WIDER = Rule(
    rms_norm_quant,
    lambda x, weight, eps: torch.ops.compilepass.rms_norm_dynamic_int8_quant(x, weight, eps),
    NORM,
)
HALF = Rule(
    rms_norm, lambda x, weight, eps: torch.ops.lint_test.opaque_norm(x, weight, eps), NORM,
    dtypes=(torch.float16,), name="half",
)  # fmt: skip


def lint(*rules: Rule) -> list[Finding]:
    return lint_rules(rules, inductor.engine())


def test_a_rule_that_takes_a_part_starves_the_wider_one_after_it() -> None:
    (finding,) = lint(OPAQUE, WIDER)
    assert (finding.kind, finding.rule, finding.by) == ("starved", str(WIDER), str(OPAQUE))


def test_a_part_that_becomes_a_known_kernel_starves_nobody() -> None:
    assert lint(KNOWN, WIDER) == []


def test_the_wider_rule_first_is_in_order() -> None:
    assert lint(WIDER, OPAQUE) == []


def test_the_same_pattern_again_is_shadowed() -> None:
    (finding,) = lint(OPAQUE, KNOWN)
    assert (finding.kind, finding.rule) == ("shadowed", str(KNOWN))
    assert "runs first and takes all" in str(finding)


def test_a_rule_is_shadowed_in_one_dtype_too() -> None:
    (finding,) = lint(HALF, KNOWN)
    assert finding.kind == "shadowed"


def test_rules_for_other_dtypes_do_not_meet() -> None:
    single = Rule(rms_norm, KNOWN.replacement, NORM, dtypes=(torch.float32,))
    assert lint(HALF, single) == []


def test_the_shipped_plan_is_clean() -> None:
    ctx = PassContext("cpu", "fx", True)
    plan = cp.plan(cp.CompilationConfig(backend="fx", passes=["all"]))
    rules = [r for p in plan.running if isinstance(p, FusionPass) for r in p.rules(ctx)]
    assert len(rules) > 5
    assert [str(f) for f in lint(*rules)] == []
