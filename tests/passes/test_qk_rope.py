"""``fuse_qk_rope`` pairs the rotations of queries and keys, where one can move to the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import compilepass as cp
from compilepass.models import Target, build
from compilepass.testing import expect_matches

rotate = torch.ops.compilepass.rotate


def tables() -> tuple[Tensor, Tensor]:
    cos, sin = torch.randn(2, 5, 8)
    return cos, sin


def compiled(function: Callable[..., object], *args: Tensor) -> Callable[..., object]:
    """``function`` compiled, after its results have been compared."""
    with torch.no_grad():
        fast = cp.compile(function, cp.CompilationConfig(backend="fx"))
        torch.testing.assert_close(fast(*args), function(*args))
    return fast


def heads(count: int) -> Tensor:
    return torch.randn(2, count, 5, 8)


def test_two_rotations_with_the_same_tables_become_one_call() -> None:
    def layer(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q + 1, cos, sin), rotate(k * 2, cos, sin) + 1

    expect_matches(compiled(layer, heads(3), heads(1), *tables()), {"fuse_qk_rope": 1})


def test_users_that_stand_between_the_two_move_behind_them() -> None:
    def layer(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        used = rotate(q, cos, sin).sum() + 1
        return rotate(k, cos, sin) + used

    expect_matches(compiled(layer, heads(3), heads(1), *tables()), {"fuse_qk_rope": 1})


def test_a_rotation_that_needs_the_other_is_left_alone() -> None:
    def layer(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(rotate(q, cos, sin) + 1, cos, sin)

    expect_matches(compiled(layer, heads(3), *tables()), {"fuse_qk_rope": 0})


@pytest.mark.parametrize("other", ["tables", "flags", "dtype"])
def test_rotations_that_differ_in_more_than_what_is_rotated_are_left_alone(other: str) -> None:
    def layer(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if other == "dtype":
            return rotate(q, cos, sin), rotate(k.bfloat16(), cos, sin)
        first, second = (sin, cos) if other == "tables" else (cos, sin)
        return rotate(q, cos, sin), rotate(k, first, second, interleaved=other == "flags")

    expect_matches(compiled(layer, heads(3), heads(1), *tables()), {"fuse_qk_rope": 0})


def test_three_rotations_are_a_pair_and_one_that_is_left() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        return [rotate(x, cos, sin) for x in (q, k, v)]

    expect_matches(compiled(layer, heads(3), heads(1), heads(2), *tables()), {"fuse_qk_rope": 1})


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("family", "before"),
    [("llama", "fuse_rope"), ("glm", "fuse_rope"), ("qwen3", "fuse_qk_norm_rope")],
)
def test_each_layer_of_a_model_rotates_once(family: str, before: str, dynamic: bool | None) -> None:
    pytest.importorskip("transformers")
    with torch.no_grad():
        model: Any
        model, given = build(Target(f"hf:{family}"))
        fast: Any = cp.compile(model, cp.CompilationConfig(backend="fx", dynamic=dynamic))
        torch.testing.assert_close(fast(**given).logits, model(**given).logits)
    expect_matches(fast, {before: 4, "fuse_qk_rope": 2})
