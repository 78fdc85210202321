"""Every spelling reaches its kernel, in each dtype, rank and with static and dynamic sizes."""

from __future__ import annotations

import pytest
import torch

from .capture import compiled
from .spellings import SPELLINGS, inputs

RTOL = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
ATOL = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", RTOL, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_reaches_its_kernel(
    name: str, dtype: torch.dtype, dynamic: bool, rank: int
) -> None:
    spelling = SPELLINGS[name]
    torch.manual_seed(0)
    args = inputs(spelling, dtype, rank)
    done = compiled(spelling.fn, args, dynamic=dynamic)
    assert done.kernels == spelling.expected(dtype)
    assert done.changes_again == 0
    eager = spelling.fn(*args)
    for mine, theirs in zip(_tensors(done.result), _tensors(eager), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if mine.dtype == torch.int8:
            assert (mine.short() - theirs.short()).abs().max() <= 1
        else:
            torch.testing.assert_close(mine, theirs, rtol=RTOL[dtype], atol=ATOL[dtype])


def _tensors(result: object) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]
