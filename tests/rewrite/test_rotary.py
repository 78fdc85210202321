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
