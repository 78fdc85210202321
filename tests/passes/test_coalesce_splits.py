"""``coalesce_splits`` takes pieces of a concatenation as they are, and splits at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import compilepass as cp
from compilepass.testing import expect_matches, graph_of

PASS = "coalesce_splits"
FX = cp.CompilationConfig(backend="fx")
ONLY = FX.model_copy(update={"passes": ["none", f"+{PASS}", "+clean_up"]})


def calls(fn: Callable[..., Any], *args: Tensor) -> Counter[str]:
    graph = graph_of(fn, args, ONLY).graph
    called = (n.target for n in graph.nodes if n.op == "call_function")
    return Counter(getattr(t, "overloadpacket", t).__name__ for t in called)


def layouts(value: Any) -> list[Any]:
    return [(t.shape, [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1])
            for t in tree_leaves(value)]  # fmt: skip


def check(fn: Callable[..., Any], *args: Tensor, changes: int, dynamic: bool | None = None) -> None:
    with torch.no_grad():
        fast = cp.compile(fn, ONLY.model_copy(update={"dynamic": dynamic}))
        found, wanted = fast(*args), fn(*args)
    record = next(p for p in cp.report(fast).passes if p.name == PASS)
    assert (record.status, record.changes) == ("ran", changes)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert layouts(found) == layouts(wanted)


A, B, C = torch.randn(3, 4), torch.randn(3, 8), torch.randn(3, 4)


def by_slices(a: Tensor, b: Tensor, c: Tensor) -> Any:
    whole = torch.cat([a.sin(), b.sin(), c.sin()], -1)
    return whole[:, :4] + 1, whole[:, 4:12] * 2, whole[:, 12:] - c


def by_split(a: Tensor, b: Tensor, c: Tensor) -> Any:
    first, second, third = torch.cat([a.sin(), b.sin(), c.sin()], 1).split([4, 8, 4], 1)  # type: ignore[no-untyped-call]
    return first + third, second * 2


def by_chunk(a: Tensor, b: Tensor, c: Tensor) -> Any:
    first, second = torch.cat([a, c], -1).chunk(2, -1)
    return first * torch.sigmoid(second)


def along_rows(a: Tensor, b: Tensor, c: Tensor) -> Any:
    whole = torch.cat([a, c])
    return whole[:3] * 2, whole[3:] + 1


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("fn", "pieces"), [(by_slices, 3), (by_split, 3), (by_chunk, 2)])
def test_pieces_are_taken_without_their_concatenation(
    fn: Callable[..., Any], pieces: int, dynamic: bool | None
) -> None:
    args = [t.clone() for t in (A, B, C)]
    for t in args:
        torch._dynamo.mark_static(t, 1)
    check(fn, *args, changes=pieces, dynamic=dynamic)
    assert not calls(fn, A, B, C) & Counter(cat=1, slice=1, split_with_sizes=1, split=1)


def test_rows_are_pieces_where_their_number_is_known() -> None:
    check(along_rows, A, B, C, changes=2)


def test_two_neighbours_are_a_smaller_concatenation() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> Any:
        whole = torch.cat([a, b, c], -1)
        return whole[:, 4:] * 2

    check(fn, A, B, C, changes=1)
    assert calls(fn, A, B, C) == Counter(cat=1, mul=1)


def test_views_of_a_piece_get_its_strides() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> Any:
        whole = torch.cat([a.sin(), b.sin()], -1)
        heads = whole[:, 4:].unflatten(-1, (2, 4)).transpose(0, 1)  # type: ignore[no-untyped-call]
        return heads @ heads.mT, heads.exp()

    check(fn, A, B, C, changes=1)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)], ids=str)
def test_parts_that_make_up_a_tensor_become_one_split(order: tuple[int, ...]) -> None:
    def fn(x: Tensor) -> Any:
        x = x.sin()
        bounds = ((0, 4), (4, 12), (12, 16))
        return [x[:, slice(*bounds[i])] * (i + 2) for i in order]

    check(fn, torch.randn(3, 16), changes=1)
    assert calls(fn, torch.randn(3, 16)) == Counter(sin=1, split_with_sizes=1, getitem=3, mul=3)


def across_pieces(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.cat([a, b], -1)[:, 2:6] * 2


def every_second(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.cat([a, b], -1)[:, ::2] * 2


def along_another_dim(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.cat([a, c], 0)[:, :2] * 2


def in_another_dtype(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.cat([a.half(), b], -1)[:, :4] * 2


def returned(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.cat([a, b], -1)[:, :4]


def a_view_returned(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.cat([a, b], -1)[:, 4:].unflatten(-1, (2, 4))  # type: ignore[no-untyped-call]


def a_part_missing(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return b[:, :2] + b[:, 2:4] + b[:, 4:6]


def overlapping(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return b[:, :4] + b[:, 2:6] + b[:, 4:]


@pytest.mark.parametrize(
    "fn",
    [
        across_pieces,
        every_second,
        along_another_dim,
        in_another_dtype,
        returned,
        a_view_returned,
        a_part_missing,
        overlapping,
    ],
    ids=lambda fn: fn.__name__,
)
def test_what_is_nearly_that_is_left_alone(fn: Callable[..., Any]) -> None:
    check(fn, A, B, C, changes=0)


def test_the_result_is_not_a_view_of_an_input() -> None:
    a = A.clone()
    fast = cp.compile(a_view_returned, ONLY)
    with torch.no_grad():
        fast(a, B, C).zero_()
    torch.testing.assert_close(a, A)


def test_a_gate_whose_halves_were_joined_is_a_gate_of_two_tensors() -> None:
    def fn(a: Tensor, c: Tensor) -> Tensor:
        gate, up = torch.cat([a, c], -1).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    with torch.no_grad():
        fast = cp.compile(fn, FX)
        torch.testing.assert_close(fast(A, C), fn(A, C))
    expect_matches(fast, {PASS: 2, "fuse_act_and_mul": 1})
