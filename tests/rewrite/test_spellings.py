"""Every spelling reaches its kernel, in each dtype, rank, and with static and dynamic sizes."""

from __future__ import annotations

import pytest
import torch

from .capture import compiled
from .spellings import SPELLINGS, inputs

RTOL = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
ATOL = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

#: dtype, rank of the rows, dynamic=True
FORMS = [
    (torch.float32, 3, True),
    (torch.bfloat16, 3, False),
    (torch.bfloat16, 2, True),
    (torch.float16, 2, False),
]


@pytest.mark.parametrize(
    ("dtype", "rank", "dynamic"),
    FORMS,
    ids=[f"{str(d)[6:]}-{rank}d-{'dynamic' if dyn else 'static'}" for d, rank, dyn in FORMS],
)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_reaches_its_kernel(
    name: str, dtype: torch.dtype, rank: int, dynamic: bool
) -> None:
    spelling = SPELLINGS[name]
    torch.manual_seed(0)
    args = inputs(spelling, dtype, rank)
    done = compiled(spelling.fn, args, dynamic=dynamic)
    assert done.kernels == spelling.kernels
    assert done.changes_again == 0
    for mine, theirs in zip(_tensors(done.result), _tensors(spelling.fn(*args)), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if mine.dtype == torch.int8:
            assert (mine.short() - theirs.short()).abs().max() <= 1
        else:
            torch.testing.assert_close(mine, theirs, rtol=RTOL[dtype], atol=ATOL[dtype])


def _tensors(result: object) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]
