"""What follows from a graph's guards for its sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compilepass.rewrite.term import same, size_of


def size_with(guard: Callable[[Any], Any], hint: int) -> Any:
    """A symbolic size under a guard."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    size = mode.from_tensor(torch.empty(hint), symbolic_context=context).shape[0]
    assert guard(size)
    return size


HALVES = {
    "floor and rest": lambda s: s // 2 == s - s // 2,
    "ceiling and rest": lambda s: (s + 1) // 2 == s - (s + 1) // 2,
    "no remainder": lambda s: s % 2 == 0,
    "shifted": lambda s: (s + 4) // 2 == s - s // 2 + 2,
}


@pytest.mark.parametrize("name", HALVES)
def test_halves_that_a_guard_makes_equal_are_one_size(name: str) -> None:
    s = size_with(HALVES[name], 48)
    halves = [size_of(h) for h in (s // 2, (s + 1) // 2, s - s // 2, s - (s + 1) // 2)]
    assert len(set(halves)) == 1
    assert same(2 * halves[0], size_of(s))


def test_thirds() -> None:
    s = size_with(lambda s: s % 3 == 0, 48)
    assert same(size_of(s // 3) * 3, size_of(s))
    assert same(size_of((s + 2) // 3), size_of(s // 3))


@pytest.mark.parametrize(
    "guard",
    [lambda s: s // 2 == 24, lambda s: s % 2 != 1, lambda s: s // 2 < s, lambda s: s // 32 == 1],
    ids=["one size", "an inequality", "less", "a large part"],
)
def test_what_a_guard_does_not_say_is_not_assumed(guard: Callable[[Any], Any]) -> None:
    s = size_with(guard, 48)
    assert not same(size_of(s // 2), size_of(s - s // 2)) or size_of(s) == 48
