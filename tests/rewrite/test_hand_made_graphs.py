"""Graphs that a functional capture never gives: writes between nodes, and mixed devices."""

from __future__ import annotations

import torch
from torch import Tensor

from compilepass.rewrite import Rule

from .one_rule import HandMade, aten

ROWS = {"x": ("T", "H"), "y": ("T", "H")}


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


RULE = Rule(add_relu, lambda x, y: torch.clamp_min(x + y, 0.0), ROWS)


def refused(made: HandMade, code: str, *outputs: object) -> str:
    """Apply the rule; it must refuse with ``code``. Returns the name of the blocking node."""
    applied = made.apply(RULE, *outputs)  # type: ignore[arg-type]
    assert applied.result.count == 0
    assert applied.unchanged
    assert applied.result.refusals == {code: 1}
    assert applied.near is not None and applied.near.code == code
    return applied.near.blocker.split(" = ")[0]


def test_a_graph_without_writes_is_rewritten() -> None:
    made = HandMade()
    x, y = made.input("x", 8, 64), made.input("y", 8, 64)
    relu = made.call(aten.relu.default, made.call(aten.add.Tensor, x, y))
    assert made.apply(RULE, relu).result.count == 1


def test_a_write_to_an_interior_value() -> None:
    made = HandMade()
    x, y = made.input("x", 8, 64), made.input("y", 8, 64)
    total = made.call(aten.add.Tensor, x, y)
    made.call(aten.add_.Tensor, total, 1.0)
    assert refused(made, "extra_user", made.call(aten.relu.default, total)) == "add_tensor"


def test_a_write_to_an_input_between_the_nodes() -> None:
    made = HandMade()
    x, y, z = (made.input(n, 8, 64) for n in "xyz")
    total = made.call(aten.add.Tensor, x, y)
    made.call(aten.add_.Tensor, x, 1.0)
    # the other input is ready only after the write, and so would be the replacement
    relu = made.call(aten.relu.default, total)
    late = made.call(aten.mul.Tensor, relu, z)
    assert refused(made, "mutation", relu, late) == "add__tensor"


def test_a_write_through_a_view_of_an_input() -> None:
    made = HandMade()
    x, y = made.input("x", 8, 64), made.input("y", 8, 64)
    total = made.call(aten.add.Tensor, x, y)
    row = made.call(aten.select.int, x, 0, 0)
    made.call(aten.zero_.default, row)
    assert refused(made, "mutation", made.call(aten.relu.default, total)) == "zero__default"


def test_a_write_to_the_origin_of_a_copy() -> None:
    made = HandMade()
    x, y = made.input("x", 8, 64), made.input("y", 8, 64)
    copy = made.call(aten.clone.default, x)
    made.call(aten.zero_.default, x)
    relu = made.call(aten.relu.default, made.call(aten.add.Tensor, copy, y))
    assert refused(made, "mutation", relu) == "zero__default"


def test_a_write_to_a_copy() -> None:
    made = HandMade()
    x, y = made.input("x", 8, 64), made.input("y", 8, 64)
    copy = made.call(aten.clone.default, x)
    made.call(aten.zero_.default, copy)
    relu = made.call(aten.relu.default, made.call(aten.add.Tensor, copy, y))
    assert refused(made, "mutation", relu) == "zero__default"
    ones = torch.ones(8, 64)
    assert torch.equal(made.run(ones, ones)[0], ones)


def test_a_write_before_the_match_is_no_obstacle() -> None:
    made = HandMade()
    x, y = made.input("x", 8, 64), made.input("y", 8, 64)
    made.call(aten.add_.Tensor, x, 1.0)
    relu = made.call(aten.relu.default, made.call(aten.add.Tensor, x, y))
    applied = made.apply(RULE, relu)
    assert applied.result.count == 1
    ones = torch.ones(8, 64)
    assert torch.equal(made.run(ones.clone(), ones)[0], 3 * ones)


def test_a_write_to_the_result_afterwards_is_no_obstacle() -> None:
    made = HandMade()
    x, y = made.input("x", 8, 64), made.input("y", 8, 64)
    relu = made.call(aten.relu.default, made.call(aten.add.Tensor, x, y))
    written = made.call(aten.add_.Tensor, relu, 1.0)
    assert made.apply(RULE, written).result.count == 1
    ones = torch.ones(8, 64)
    assert torch.equal(made.run(ones, ones)[0], 3 * ones)


def test_nodes_are_not_moved_past_a_write() -> None:
    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.relu(x)
        return a, a * y

    made = HandMade()
    x, z = made.input("x", 8, 64), made.input("z", 8, 64)
    relu = made.call(aten.relu.default, x)
    user = made.call(aten.div.Tensor, relu, z)
    made.call(aten.zero_.default, z)
    late = made.call(aten.sin.default, x)
    product = made.call(aten.mul.Tensor, relu, late)
    applied = made.apply(Rule(two, two, ROWS), user, product)
    assert applied.result.refusals["mutation"] == 1
    assert applied.unchanged


def test_values_on_two_devices() -> None:
    made = HandMade()
    x = made.input("x", 8, 64)
    y = made.input("y", 8, 64, device="meta")
    total = made.call(aten.add.Tensor, x, x)
    total.args = (x, y)  # fake tensors would not allow it
    refused(made, "device", made.call(aten.relu.default, total))
