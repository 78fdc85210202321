"""Equal parts of a graph are found by their nodes; what is not equal is looked at for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compilepass.rewrite import Input, Rule
from compilepass.rewrite.region import Region

from .near_misses import RMS_NORM, rms_norm
from .one_rule import HandMade, apply

W = torch.randn(64)


def normed(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return rms_norm(x, w, eps)


def eight(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(8):
        x = normed(torch.sin(x), w)
    return x


def two_eps(x: Tensor, w: Tensor) -> Tensor:
    return normed(torch.sin(normed(x, w, 1e-6)), w, 1e-5)


def two_widths(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return normed(x, w), normed(x[:, :32].contiguous(), w[:32].contiguous())


def two_layouts(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return normed(x, w), normed(x[:, ::2], w[::2])


def weight_first_and_last(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    other = torch.sin(x)
    variance = other.pow(2).mean(-1, keepdim=True)
    return normed(x, w), (other * torch.rsqrt(variance + 1e-6)) * w


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Region]:
    """The regions that were found by a search, not by their likeness to another."""
    found: list[Region] = []
    whole = Region.of

    def kept(*args: Any) -> Region:
        found.append(whole(*args))
        return found[-1]

    monkeypatch.setattr(Region, "of", kept)
    return found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("model", "sites", "kinds"),
    [
        (eight, 8, 1),
        (two_eps, 2, 2),
        (two_widths, 2, 2),
        (two_layouts, 2, 2),
        (weight_first_and_last, 2, 2),
    ],
)
def test_equal_sites_need_one_search(
    searched: list[Region], model: Callable[..., Any], sites: int, kinds: int, dynamic: bool
) -> None:
    x = torch.randn(8, 64)
    torch._dynamo.mark_static(x, 1)
    applied = apply(model, (x, W), RMS_NORM, dynamic=dynamic)
    assert applied.result.count == sites
    assert len(searched) == kinds
    torch.testing.assert_close(applied.output, model(x, W))


def test_sites_are_told_in_the_order_of_the_graph() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        a = normed(x, w, 1e-6)
        b = normed(torch.sin(a), w, 1e-5)
        return normed(torch.cos(b), w, 1e-6)

    applied = apply(model, (torch.randn(8, 64), W), RMS_NORM)
    places = [site.sources[0].split(":")[1] for site in applied.result.sites]
    assert len(places) == 3
    assert places == sorted(places)


def test_an_equal_site_with_another_user_is_refused() -> None:
    def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.sin(x)
        variance = y.pow(2).mean(-1, keepdim=True)
        return normed(x, w), w * (y * torch.rsqrt(variance + 1e-6)), variance

    applied = apply(model, (torch.randn(8, 64), W), RMS_NORM)
    assert (applied.result.count, dict(applied.result.refusals)) == (1, {"extra_user": 1})
    assert applied.near is not None and applied.near.code == "extra_user"


def test_a_refused_site_is_refused_wherever_it_is_equal() -> None:
    rule = Rule(
        RMS_NORM.pattern, RMS_NORM.replacement, RMS_NORM.inputs, lambda m: m.reject("not today")
    )
    applied = apply(eight, (torch.randn(8, 64), W), rule)
    assert dict(applied.result.refusals) == {"check": 8}
    assert applied.unchanged


aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default
SAME = object()  # the value that the step is applied to, once more

#: steps that are repeated, each an operation with its further arguments
LONG: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {
    "products": [(aten.mul.Tensor, (SAME,))],
    "quotients": [(aten.add.Tensor, (2,)), (aten.div.Tensor, (SAME,))],
    "views": [(aten.reshape.default, ([4, 8],))],
    "casts": [(cast, (torch.float64,)), (cast, (torch.float32,))],
    "bounds": [(aten.round.default, ()), (aten.clamp_min.default, (-9.0,))],
    "roots": [(aten.sqrt.default, ()), (aten.reciprocal.default, ())],
    "slices": [(aten.slice.Tensor, (0, 0, 4))],
    "nothing": [(aten.mul.Tensor, (1,))],
}


@pytest.mark.parametrize("kind", LONG)
def test_a_long_chain_does_not_meet_the_limit_of_recursion(kind: str) -> None:
    made = HandMade()
    x, up = made.input("x", 4, 8), made.input("up", 4, 8)
    node = x
    for _ in range(1500):
        for op, rest in LONG[kind]:
            node = made.call(op, node, *(node if a is SAME else a for a in rest))
    node = made.call(aten.relu.default, made.call(aten.add.Tensor, node, up))
    rule = Rule(
        lambda x, y: torch.relu(x + y),
        lambda x, y: torch.clamp_min(torch.add(y, x), 0.0),
        {"x": ("T", "H"), "y": ("T", "H")},
        name="add_relu",
    )
    applied = made.apply(rule, node)
    assert (applied.result.count, applied.near) == (1, None)


def dequantised_linear(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (x @ w.float().t()) * s


DEQUANTISED_LINEAR = Rule(
    dequantised_linear,
    lambda x, w, s: torch.nn.functional.linear(x, w * s.unsqueeze(-1)),
    {"x": ("T", "K"), "w": Input(("N", "K"), torch.int8), "s": ("N",)},
)


def test_a_weight_that_others_transpose_too_is_no_obstacle() -> None:
    def twice(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        columns = w.float().t()
        return (x @ columns) * s, torch.sin(x) @ columns

    args = torch.randn(4, 8), torch.ones(3, 8, dtype=torch.int8), torch.rand(3)
    applied = apply(twice, args, DEQUANTISED_LINEAR)
    assert applied.result.count == 1
    torch.testing.assert_close(applied.output, twice(*args))


def test_a_rule_of_quantised_operands_is_not_traced_where_there_are_none() -> None:
    def untraceable(w: Tensor, s: Tensor) -> Tensor:
        raise AssertionError("traced")

    inputs = {"w": Input(("N", "K"), torch.int8), "s": Input(("N", 1), torch.float32)}
    rule = Rule(untraceable, untraceable, inputs)

    def model(w: Tensor, s: Tensor) -> Tensor:
        return w * s

    assert apply(model, (torch.randn(4, 8), torch.randn(4, 1)), rule).result.error is None
    q = torch.ones(4, 8, dtype=torch.int8)
    assert "traced" in str(apply(model, (q, torch.randn(4, 1)), rule).result.error)
