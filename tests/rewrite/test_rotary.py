"""Every spelling of rotary embedding reaches ``rotate``, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .capture import compiled
from .rotary_spellings import (
    HEAD_DIM,
    ROTARY,
    heads_first,
    heads_last,
    inputs,
    of_heads_first,
    of_heads_last,
    rotate_half,
)

#: dtype, rank of the heads, dynamic=True
FORMS = [
    (torch.float32, 4, True),
    (torch.bfloat16, 4, False),
    (torch.bfloat16, 3, True),
    (torch.float16, 3, False),
]


@pytest.mark.parametrize(
    ("dtype", "rank", "dynamic"),
    FORMS,
    ids=[f"{str(d)[6:]}-{rank}d-{'dynamic' if dyn else 'static'}" for d, rank, dyn in FORMS],
)
@pytest.mark.parametrize("name", ROTARY)
def test_spelling_reaches_rotate(name: str, dtype: torch.dtype, rank: int, dynamic: bool) -> None:
    spelling = ROTARY[name]
    torch.manual_seed(0)
    args = inputs(spelling, dtype, rank)
    done = compiled(spelling.fn, args, dynamic=dynamic)
    assert done.kernels == {"rotate": spelling.calls}
    assert done.changes_again == 0
    rotate = torch.ops.compilepass.rotate.default
    for call in done.graph.find_nodes(op="call_function", target=rotate):
        interleaved, per_pair, wide = spelling.flags
        flags = (*call.args[3:], False, False, False)[:3]  # without those at their default
        assert flags == (interleaved, per_pair, wide and dtype != torch.float32)
    wanted = spelling.fn(*args)
    pairs = zip(done.result, wanted, strict=True) if spelling.calls > 1 else [(done.result, wanted)]
    for mine, theirs in pairs:
        assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(mine, theirs)  # each product and sum is rounded as before


def turned(rotation: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """``rotation`` of heads with a batch before them."""
    return lambda x, c, s: rotation(heads_first(x), of_heads_first(c), of_heads_first(s))


def other_sign(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat((second, -first), -1) * sin


def no_exchange(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat((-first, second), -1) * sin


def one_angle_a_head(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return q * cos[..., :1] + rotate_half(q) * sin[..., :1]


def another_tensor(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return q * cos + rotate_half(q.flip(-2)) * sin


def unequal_parts(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return q * cos + torch.cat((-q[..., 6:], q[..., :6]), -1) * sin


def along_another_dim(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = q.chunk(2, -3)
    return q * cos + torch.cat((-second, first), -3) * sin


def tables_exchanged_between_halves(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    (first, second), (c1, c2), (s1, s2) = (t.split(half, -1) for t in (q, cos, sin))
    return torch.cat((first * c1 - second * s1, second * c2 + first * s2), -1)


@pytest.mark.parametrize(
    "rotation",
    [
        other_sign,
        no_exchange,
        one_angle_a_head,
        another_tensor,
        unequal_parts,
        along_another_dim,
        tables_exchanged_between_halves,
    ],
    ids=lambda fn: fn.__name__,
)
def test_what_is_no_rotation_of_pairs_stays(
    rotation: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    x, (c, s) = torch.randn(2, 5, 4 * HEAD_DIM), torch.randn(2, 2, 5, HEAD_DIM)
    done = compiled(turned(rotation), (x, c, s))
    assert done.kernels == {}
    assert torch.equal(done.result, turned(rotation)(x, c, s))


def test_a_rotation_that_is_needed_elsewhere_stays() -> None:
    def both(x: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        q = heads_first(x)
        half = rotate_half(q)
        return q * of_heads_first(c) + half * of_heads_first(s), half

    x, (c, s) = torch.randn(2, 5, 4 * HEAD_DIM), torch.randn(2, 2, 5, HEAD_DIM)
    assert compiled(both, (x, c, s)).kernels == {}


@pytest.mark.parametrize("sizes", [(1, 5, 3), (2, 1, 3), (2, 5, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["heads first", "heads last"])
def test_sizes_of_one_reach_rotate(sizes: tuple[int, int, int], first: bool) -> None:
    def fn(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        q = heads_first(x) if first else heads_last(x)
        cos, sin = (of_heads_first(t) if first else of_heads_last(t) for t in (c, s))
        return q * cos + rotate_half(q) * sin

    batch, tokens, heads = sizes
    x = torch.randn(batch, tokens, heads * HEAD_DIM)
    c, s = torch.randn(2, batch, tokens, HEAD_DIM)
    done = compiled(fn, (x, c, s))
    assert done.kernels == {"rotate": 1}
    assert torch.equal(done.result, fn(x, c, s))


def test_tables_may_broadcast_along_different_dims() -> None:
    def fn(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        q = heads_first(x)
        return q * of_heads_first(c) + rotate_half(q) * s

    args = torch.randn(2, 5, 3 * HEAD_DIM), torch.randn(2, 5, HEAD_DIM), torch.randn(5, HEAD_DIM)
    done = compiled(fn, args)
    assert done.kernels == {"rotate": 1}
    assert torch.equal(done.result, fn(*args))
