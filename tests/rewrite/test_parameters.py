"""Integer parameters, and the layout that a rule declares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compilepass.errors import PatternError
from compilepass.rewrite import Rule

from .one_rule import apply


def quant_groups(x: Tensor, group: int) -> Tensor:
    parts = x.reshape(-1, x.shape[-1] // group, group)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (parts / scale).reshape(x.shape)


def spied(seen: list[int]):  # type: ignore[no-untyped-def]
    def replacement(x: Tensor, group: int) -> Tensor:
        seen.append(group)
        return quant_groups(x, group)

    return replacement


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_integer_takes_its_value_from_the_match(group: int, dynamic: bool) -> None:
    seen: list[int] = []
    rule = Rule(quant_groups, spied(seen), {"x": ("T", "G*group")})
    x = torch.randn(8, 256)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    applied = apply(lambda x: quant_groups(x, group), (x,), rule, dynamic=None)
    assert applied.result.count == 1, applied.near
    assert set(seen) == {group}
    torch.testing.assert_close(applied.output, quant_groups(x, group))


@pytest.mark.parametrize(("group", "count"), [(64, 1), (128, 0)])
def test_an_integer_with_a_default_must_be_that(group: int, count: int) -> None:
    def pattern(x: Tensor, group: int = 64) -> Tensor:
        return quant_groups(x, group)

    rule = Rule(pattern, pattern, {"x": ("T", "G*64")})
    x = torch.randn(8, 256)
    applied = apply(lambda x: quant_groups(x, group), (x,), rule)
    assert applied.result.count == count
    torch.testing.assert_close(applied.output, quant_groups(x, group), rtol=0, atol=0)
    if not count:
        assert applied.unchanged
        assert applied.near is not None and applied.near.code == "shape"
        assert applied.near.expected.endswith("64)") and applied.near.found.endswith("128)")


def test_an_integer_argument_binds_or_must_agree() -> None:
    def shifted(x: Tensor, by: int) -> Tensor:
        return torch.roll(torch.relu(x).clamp(max=by), 1) + by

    rule = Rule(shifted, shifted, {"x": ("T", "H")})
    x = torch.randn(8, 64)
    applied = apply(lambda x: shifted(x, 3), (x,), rule)
    assert applied.result.error is None, applied.result.error
    assert applied.result.count == 1, applied.near
    other = apply(lambda x: torch.roll(torch.relu(x).clamp(max=3), 1) + 4, (x,), rule)
    assert other.result.count == 0
    assert other.near is not None and other.near.code == "literal"


def test_an_integer_that_is_known_only_at_run_time_is_refused() -> None:
    rule = Rule(quant_groups, quant_groups, {"x": ("T", "G*group")})
    applied = apply(quant_groups, (torch.randn(8, 256), 64), rule, dynamic=True)
    assert applied.result.count == 0
    assert applied.near is not None


def test_a_check_sees_the_integer() -> None:
    rule = Rule(
        quant_groups,
        quant_groups,
        {"x": ("T", "G*group")},
        check=lambda m: None if m.numbers["group"] == 64 else m.reject("groups of 64 only"),
    )
    applied = apply(lambda x: quant_groups(x, 128), (torch.randn(8, 256),), rule)
    assert applied.result.refusals == {"check": 1}


def test_a_number_that_a_match_cannot_bind_is_an_error_of_the_rule() -> None:
    def pattern(x: Tensor, group: int) -> Tensor:
        return torch.relu(x)

    rule = Rule(pattern, pattern, {"x": ("T", "H")})
    applied = apply(torch.relu, (torch.randn(8, 64),), rule)
    assert isinstance(applied.result.error, PatternError)
    assert "does not use group" in str(applied.result.error)


def doubled(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


@pytest.mark.parametrize(("layout", "seen"), [("any", (1, 64)), ("contiguous", (8, 1))])
def test_a_permuted_input_comes_as_the_rule_declares(layout: str, seen: tuple[int, ...]) -> None:
    strides = []

    def replacement(x: Tensor) -> Tensor:
        strides.append(x.stride())
        return torch.relu(x) * 2

    rule = Rule(doubled, replacement, {"x": ("T", "H")}, layout=layout)  # type: ignore[arg-type]
    x = torch.randn(8, 64)
    applied = apply(lambda x: doubled(x.t()).contiguous(), (x,), rule)
    assert strides == [seen]
    torch.testing.assert_close(applied.output, doubled(x.t()))
    if layout == "any":
        assert applied.result.count == 1
    else:  # its outputs would be contiguous where permuted ones are expected
        assert applied.unchanged
        assert applied.result.refusals == {"layout": 1}
        assert applied.near is not None
        assert (applied.near.expected, applied.near.found) == ("(1, 64)", "(8, 1)")


def test_a_sliced_input_is_copied_where_the_rule_needs_it_contiguous() -> None:
    rule = Rule(doubled, doubled, {"x": ("T", "H")}, layout="contiguous")
    x = torch.randn(8, 128)
    applied = apply(lambda x: doubled(x[:, :64]), (x,), rule)
    assert applied.result.count == 1, applied.near
    copies = [n for n in applied.graph.nodes if n.target is torch.ops.aten.clone.default]
    assert len(copies) == 1
    torch.testing.assert_close(applied.output, doubled(x[:, :64]))


def test_an_output_gets_its_strides_back_by_a_copy() -> None:
    def replacement(x: Tensor) -> Tensor:
        return (torch.relu(x).t().contiguous() * 2).t()

    rule = Rule(doubled, replacement, {"x": ("T", "H")})
    x = torch.randn(8, 64)
    applied = apply(doubled, (x,), rule)
    assert applied.result.count == 1, applied.near
    assert applied.output.is_contiguous()
    torch.testing.assert_close(applied.output, doubled(x))


def test_an_unknown_layout_is_an_error() -> None:
    with pytest.raises(PatternError, match="layout is 'dense'"):
        Rule(doubled, doubled, {"x": ("T", "H")}, layout="dense")  # type: ignore[arg-type]
