# ruff: noqa: E501 - a case is a line, so that the table can be read
"""What looks like a match and is none: each case is refused with its code, and stays correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import compilepass as cp
from compilepass.kernels import native
from compilepass.rewrite import Match, Reject, Rule

from .golden import golden, text_of
from .one_rule import apply, compile_with_rules

ROWS = {"x": ("T", "H"), "y": ("T", "H")}


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


def add_relu_again(x: Tensor, y: Tensor) -> Tensor:
    return torch.clamp_min(torch.add(y, x), 0.0)


def rule_of(
    pattern: Callable[..., Any],
    replacement: Callable[..., Any] | None = None,
    /,
    check: Callable[[Match], Reject | None] | None = None,
    **inputs: Any,
) -> Rule:
    """A rule that puts the pattern itself in its own place, which is right and easy to see."""
    return Rule(pattern, replacement or pattern, inputs, check=check)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return native.rms_norm(x, weight, eps)


RMS_NORM = rule_of(rms_norm, x=("T", "H"), weight=("H",))
ADD_RELU = Rule(add_relu, add_relu_again, ROWS)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return torch.relu(x * scale)


def row_mean(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def weighted(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x * weight)


def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(torch.addmm(b, x, w)).abs().amax(-1)


def biased_twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(torch.addmm(b, x, w, alpha=3, beta=2))


def added_twice(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(torch.add(torch.sin(x), y, alpha=2))


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w)


def joined(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((x, y), -1).amax(-1)


def clamped(x: Tensor) -> Tensor:
    return torch.relu(x).clamp(max=6.0)


def twice(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y) * x


def scaled_twice(x: Tensor, by: float) -> Tensor:
    return torch.relu(x * by) + by


def even_rows(x: Tensor) -> Tensor:
    return torch.relu(x) + (1 if x.shape[-1] % 16 == 0 else 2)


def by_number(x: Tensor, by: float) -> Tensor:
    return torch.relu(x + by)


def grouped(x: Tensor, group: int) -> Tensor:
    parts = x.unflatten(-1, (-1, group))
    return parts / parts.abs().amax(-1, keepdim=True).clamp(min=1e-5)


RELU_ABS = rule_of(lambda x: torch.relu(x).abs(), x=("T", "H"))
SHAPES = {
    "scale": rule_of(scaled, x=("T", "H"), scale=("T", 1)),
    "mean": rule_of(row_mean, x=("T", "H")),
    "weight": rule_of(weighted, x=("T", "H"), weight=("H",)),
    "mm": rule_of(product, x=("T", "K"), w=("K", "N")),
    "mm_t": rule_of(lambda x, w: torch.relu(x @ w.t()), x=("T", "K"), w=("N", "K")),
}


#: refusals by what a rule puts in or by its own code, which cannot be seen before
FROM_REPLACEMENTS = ("mutation", "contract", "layout", "cycle", "error", "check")


@dataclass(frozen=True)
class Case:
    """A function that must not be rewritten by ``rule``, with the code that says why."""

    name: str
    code: str
    rule: Rule
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    dynamic: bool | None = False


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def by_mean_of_rows_given_as_a_column(x: Tensor) -> Tensor:
    return x - x.mean(-1)[None, :]


CASES = [
    # arguments that the pattern does not name
    Case("alpha", "keyword", ADD_RELU, lambda x, y: torch.relu(torch.add(x, y, alpha=3)), (t(8, 64), t(8, 64))),
    Case("addmm_alpha", "keyword", rule_of(biased, x=("T", "K"), w=("K", "N"), b=("N",)), lambda x, w, b: torch.relu(torch.addmm(b, x, w, alpha=2)).abs().amax(-1), (t(8, 16), t(16, 32), t(32))),
    Case("addmm_beta", "keyword", rule_of(biased, x=("T", "K"), w=("K", "N"), b=("N",)), lambda x, w, b: torch.relu(torch.addmm(b, x, w, beta=0.5)).abs().amax(-1), (t(8, 16), t(16, 32), t(32))),
    Case("factor_of_the_other_operand", "op", rule_of(added_twice, **ROWS), lambda x, y: torch.relu(torch.add(y, torch.sin(x), alpha=2)), (t(8, 64), t(8, 64))),
    Case("bias", "op", SHAPES["mm"], lambda x, w, b: torch.relu(torch.addmm(b, x, w)), (t(8, 16), t(16, 32), t(32))),
    Case("rounding_mode", "keyword", rule_of(lambda x, y: torch.relu(x / y), **ROWS), lambda x, y: torch.relu(torch.div(x, y, rounding_mode="floor")), (t(8, 64), t(8, 64))),
    Case("operands_of_cat", "arity", rule_of(joined, x=("T", "H"), y=("T", "H")), lambda x, y: torch.cat((x, y, x), -1).amax(-1), (t(8, 64), t(8, 64))),
    Case("dim_of_cat", "shape", rule_of(joined, x=("T", "H"), y=("T", "H")), lambda x, y: torch.cat((x, y), 0).amax(-1), (t(64, 64), t(64, 64))),
    Case("bound_of_clamp", "literal", rule_of(clamped, x=("T", "H")), lambda x: torch.relu(x).clamp(max=5.0), (t(8, 64),)),
    Case("another_operation", "op", ADD_RELU, lambda x, y: torch.relu(x - y), (t(8, 64), t(8, 64))),
    Case("two_numbers_for_one", "literal", rule_of(scaled_twice, x=("T", "H")), lambda x: torch.relu(x * 2.0) + 3.0, (t(8, 64),)),
    Case("two_values_for_one", "binding", rule_of(twice, **ROWS), lambda x, y: torch.relu(x + y) * (x * 3), (t(8, 64), t(8, 64))),
    Case("number_of_the_caller", "scalar", rule_of(by_number, x=("T", "H")), lambda x, by: torch.relu(x + by), (t(8, 64), 0.37), True),
    Case("tensor_for_a_number", "scalar", rule_of(by_number, x=("T", "H")), lambda x, by: torch.relu(x + by), (t(8, 64), torch.tensor(0.37))),
    # dtypes
    Case("weight_in_another_dtype", "dtype", RMS_NORM, lambda x, w: native.rms_norm(x, w, 1e-6), (t(8, 64, dtype=torch.bfloat16), t(64))),
    # another dimension, also where sizes are equal
    Case("mean_of_columns", "dim", SHAPES["mean"], lambda x: x - x.mean(0, keepdim=True), (t(64, 64),)),
    Case("mean_of_columns_as_rows", "dim", SHAPES["mean"], lambda x: x - x.mean(0)[:, None], (t(64, 64),)),
    Case("mean_of_rows_along_columns", "broadcast", SHAPES["mean"], by_mean_of_rows_given_as_a_column, (t(64, 64),)),
    Case("mean_of_the_transposed", "binding", SHAPES["mean"], lambda x: x - x.t().mean(-1, keepdim=True), (t(64, 64),)),
    Case("mean_of_all", "dim", SHAPES["mean"], lambda x: x - x.mean(), (t(64, 64),)),
    Case("mean_of_the_middle", "dim", SHAPES["mean"], lambda x: x - x.mean(1, keepdim=True), (t(64, 64, 64),)),
    Case("mean_of_columns_dynamic", "dim", SHAPES["mean"], lambda x: x - x.mean(0, keepdim=True), (t(64, 64),), True),
    Case("weight_along_columns", "broadcast", SHAPES["weight"], lambda x, w: torch.relu(x * w[:, None]), (t(64, 64), t(64))),
    Case("weight_along_columns_dynamic", "broadcast", SHAPES["weight"], lambda x, w: torch.relu(x * w[: x.shape[0], None]), (t(64, 64), t(64)), True),
    Case("weight_along_the_middle", "broadcast", SHAPES["weight"], lambda x, w: torch.relu(x * w[:, None]), (t(2, 64, 64), t(64))),
    Case("row_times_column", "broadcast", SHAPES["weight"], lambda x, w: torch.relu(x * w[:, None]), (t(1, 64), t(64))),
    Case("scale_along_rows", "broadcast", SHAPES["scale"], lambda x, s: torch.relu(x * s.t()), (t(64, 64), t(64, 1))),
    Case("scale_of_the_last_dim", "broadcast", SHAPES["scale"], lambda x, s: torch.relu(x * s[0]), (t(64, 64), t(1, 64))),
    Case("scale_of_one_batch", "broadcast", SHAPES["scale"], lambda x, s: torch.relu(x * s), (t(2, 8, 64), t(1, 8, 1))),
    Case("residual_of_one_batch", "broadcast", ADD_RELU, lambda x, y: torch.relu(x + y), (t(2, 8, 64), t(1, 8, 64))),
    Case("residual_of_one_row", "broadcast", ADD_RELU, lambda x, y: torch.relu(x + y), (t(8, 64), t(64))),
    Case("square_weight_not_transposed", "op", SHAPES["mm_t"], lambda x, w: torch.relu(x @ w), (t(64, 64), t(64, 64))),
    Case("column_for_a_row", "shape", rule_of(lambda x, w: torch.relu(x @ w), x=("T", 64), w=(64, "N")), lambda x, w: torch.relu(x @ w), (t(64, 1), t(1, 64))),
    Case("another_fixed_size", "shape", rule_of(lambda x: torch.relu(x).abs(), x=("T", 64)), lambda x: torch.relu(x).abs(), (t(8, 32),)),
    Case("another_group", "shape", rule_of(lambda x, group=64: grouped(x, group), x=("T", "G*64")), lambda x: grouped(x, 128), (t(8, 256),)),
    Case("size_condition", "guard", rule_of(even_rows, x=("T", "H")), lambda x: torch.relu(x) + 1, (t(8, 40),)),
    # other users
    Case("interior_value_used", "extra_user", ADD_RELU, lambda x, y: (torch.relu(z := x + y), z * 3), (t(8, 64), t(8, 64))),
    Case("interior_value_returned", "extra_user", rule_of(lambda x, y: torch.relu(x * y).abs(), **ROWS), lambda x, y: (torch.relu(z := x * y).abs(), z), (t(8, 64), t(8, 64))),
    Case("view_of_interior_value_returned", "extra_user", rule_of(lambda x, y: torch.relu(x * y).abs(), **ROWS), lambda x, y: (torch.relu(z := x * y).abs(), z.reshape(-1)), (t(8, 64), t(8, 64))),
    # the replacement
    Case("replacement_writes_to_an_input", "mutation", rule_of(add_relu, lambda x, y: x.add_(y).relu(), **ROWS), add_relu, (t(8, 64), t(8, 64))),
    Case("replacement_writes_to_a_value_that_others_read", "mutation", rule_of(add_relu, lambda x, y: x.add_(y).relu(), **ROWS), lambda x, y: (torch.relu((z := torch.sin(x)) + y), z * 2), (t(8, 64), t(8, 64))),
    Case("replacement_writes_through_a_view", "mutation", rule_of(add_relu, lambda x, y: x.view(-1).add_(y.view(-1)).view(x.shape).relu(), **ROWS), add_relu, (t(8, 64), t(8, 64))),
    Case("replacement_of_another_dtype", "contract", rule_of(add_relu, lambda x, y: torch.relu(x + y).double(), **ROWS), add_relu, (t(8, 64), t(8, 64))),
    Case("replacement_of_another_size", "error", rule_of(add_relu, lambda x, y: torch.relu(x + y)[:, :3], **ROWS), add_relu, (t(8, 64), t(8, 64))),
    Case("replacement_of_too_many_values", "error", rule_of(add_relu, lambda x, y: (x, y), **ROWS), add_relu, (t(8, 64), t(8, 64))),
    Case("replacement_of_no_tensor", "error", rule_of(add_relu, lambda x, y: 3, **ROWS), add_relu, (t(8, 64), t(8, 64))),
    Case("replacement_that_raises", "error", rule_of(add_relu, lambda x, y: 1 / 0, **ROWS), add_relu, (t(8, 64), t(8, 64))),
    Case("replacement_that_reads_values", "error", rule_of(add_relu, lambda x, y: x * x.sum().item(), **ROWS), add_relu, (t(8, 64), t(8, 64))),
    Case("replacement_that_returns_its_input", "contract", rule_of(lambda x: torch.relu(x) * 3, lambda x: x, x=("T", "H")), lambda x: torch.relu(x) * 3, (t(8, 64),)),
    Case("replacement_that_returns_one_value_twice", "contract", rule_of(lambda x: (a := torch.relu(x), a * 3), lambda x: ((a := torch.relu(x)), a), x=("T", "H")), lambda x: (a := torch.relu(x), a * 3), (t(8, 64),)),
    Case("strides_of_a_permuted_value", "layout", rule_of(add_relu, lambda x, y: torch.relu(x.contiguous() + y.contiguous()), **ROWS), lambda x, y: torch.relu(x.t() + y.t()), (t(64, 8), t(64, 8))),
    # the rule's check
    Case("check_refuses", "check", rule_of(add_relu, check=lambda m: m.reject("too wide"), **ROWS), add_relu, (t(8, 64), t(8, 64))),
    Case("check_raises", "error", rule_of(add_relu, check=lambda m: 1 / 0, **ROWS), add_relu, (t(8, 64), t(8, 64))),
    Case("check_answers_false", "error", rule_of(add_relu, check=lambda m: False, **ROWS), add_relu, (t(8, 64), t(8, 64))),
    Case("inputs_need_the_output", "cycle", rule_of(lambda x, w: (a := torch.relu(x), a * w), x=("T", "H"), w=("T", "H")), lambda x: (a := torch.relu(x), a * torch.sin(a)), (t(8, 64),)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_refused_with_its_code_and_left_as_it_was(case: Case) -> None:
    applied = apply(case.fn, case.args, case.rule, dynamic=case.dynamic)
    assert applied.result.error is None, applied.result.error
    assert applied.result.count == 0
    assert applied.unchanged
    assert applied.near is not None
    assert applied.near.code == case.code, applied.near
    assert applied.near.blocker
    assert text_of(applied.near) == golden("refusals", case.name)
    torch.testing.assert_close(applied.output, case.fn(*case.args), rtol=0, atol=0)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.code in FROM_REPLACEMENTS], ids=lambda c: c.name
)
def test_no_refusal_leaves_a_compile_and_the_report_tells_it(case: Case) -> None:
    with torch.no_grad():
        fast = compile_with_rules(case.fn, case.rule)
        torch.testing.assert_close(fast(*case.args), case.fn(*case.args), rtol=0, atol=0)
    found = cp.report(fast)
    (record,) = [p for p in found.passes if p.name == "rules_of_test"]
    assert record.changes == 0
    assert [n.code for n in found.near_misses] == [case.code]


POSITIVE: Sequence[tuple[Rule, Callable[..., Any], tuple[Any, ...]]] = [
    (ADD_RELU, add_relu, (t(8, 64), t(8, 64))),
    (ADD_RELU, lambda x, y: torch.relu(y + x), (t(2, 8, 64), t(2, 8, 64))),
    (rule_of(added_twice, **ROWS), added_twice, (t(8, 64), t(8, 64))),
    (rule_of(biased, x=("T", "K"), w=("K", "N"), b=("N",)), biased, (t(8, 16), t(16, 32), t(32))),
    (RMS_NORM, lambda x, w: native.rms_norm(x, w, 1e-6), (t(64, 64), t(64))),
    (
        rule_of(biased_twice, x=("T", "K"), w=("K", "N"), b=("N",)),
        biased_twice,
        (t(8, 16), t(16, 32), t(32)),
    ),
    (SHAPES["mean"], row_mean, (t(64, 64),)),
    (SHAPES["mean"], lambda x: x - x.mean(1)[:, None], (t(64, 64),)),
    (SHAPES["weight"], weighted, (t(64, 64), t(64))),
    (SHAPES["scale"], lambda x, s: torch.relu(x * s[:, None]), (t(64, 64), t(64))),
    (SHAPES["mean"], lambda x: x - x.mean(0, keepdim=True), (t(64, 1),)),  # one row, written down
    (SHAPES["mm"], product, (t(64, 1), t(1, 64))),
    (RELU_ABS, lambda x: torch.relu(x.view(torch.int32).float()).abs(), (t(8, 64),)),
    (SHAPES["mm_t"], lambda x, w: F.linear(x, w).relu(), (t(64, 64), t(64, 64))),
]


@pytest.mark.parametrize("number", range(len(POSITIVE)))
def test_what_the_rules_are_for_is_rewritten(number: int) -> None:
    rule, fn, args = POSITIVE[number]
    applied = apply(fn, args, rule)
    assert applied.result.count == 1, applied.near
    torch.testing.assert_close(applied.output, fn(*args))
