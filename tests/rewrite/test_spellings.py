"""Every spelling reaches its kernel, in each dtype, rank, and with static and dynamic sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .capture import compiled
from .spellings import SPELLINGS, inputs, rms_norm_gemma, rms_norm_llama, rms_norm_torch

RTOL = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
ATOL = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

DTYPES = tuple(RTOL)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_reaches_its_kernel_in_each_dtype(name: str, rank: int, dynamic: bool) -> None:
    """The three dtypes are three calls in one graph, whose kernels are told apart by dtype."""
    spelling = SPELLINGS[name]
    torch.manual_seed(0)
    given = [inputs(spelling, dtype, rank) for dtype in DTYPES]

    def each(*flat: torch.Tensor) -> list[Any]:
        n = len(spelling.tensors)
        return [spelling.fn(*flat[i : i + n]) for i in range(0, len(flat), n)]

    done = compiled(each, [t for args in given for t in args], dynamic=dynamic)
    assert {d: done.kernels_of(d) for d in DTYPES} == dict.fromkeys(DTYPES, spelling.kernels)
    assert done.changes_again == 0
    for dtype, args, result in zip(DTYPES, given, done.result, strict=True):
        assert_close(result, spelling.fn(*args), dtype)


#: those that split a row, whose halves are equal by a guard only, and a few others
ANY_WIDTH = [
    *(
        n
        for n, s in SPELLINGS.items()
        if any(k.split("_")[0] in ("silu", "gelu") for k in s.kernels)
    ),
    "rms_norm_llama",
    "rms_norm_torch",
    "rms_norm_gemma",
    "rms_norm_sum_over_count",
    "rms_norm_sum_times_inverse_count",
    "add_rms_norm_both_returned",
    "quant_amax",
]


@pytest.mark.parametrize("name", ANY_WIDTH)
def test_spelling_reaches_its_kernel_at_a_width_that_is_not_known(name: str) -> None:
    spelling = SPELLINGS[name]
    args = [t.clone() for t in inputs(spelling, torch.bfloat16, 3)]  # without the static marks
    done = compiled(spelling.fn, args, dynamic=True)
    assert done.kernels == spelling.kernels
    assert_close(done.result, spelling.fn(*args), torch.bfloat16)


def test_two_variants_of_a_norm_of_one_input() -> None:
    """In float32; elsewhere they share what each would have to compute alone."""
    x, w, v = inputs(SPELLINGS["two_norms_of_one_input"], torch.float32, 3)

    def norms(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rms_norm_llama(x, w), rms_norm_torch(x, v), rms_norm_gemma(x, v)

    done = compiled(norms, (x, w, v))
    assert done.kernels == {"rms_norm": 3}
    assert_close(done.result, norms(x, w, v), torch.float32)


def assert_close(got: object, wanted: object, dtype: torch.dtype) -> None:
    for mine, theirs in zip(_tensors(got), _tensors(wanted), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if mine.dtype == torch.int8:
            assert (mine.short() - theirs.short()).abs().max() <= 1
        else:
            torch.testing.assert_close(mine, theirs, rtol=RTOL[dtype], atol=ATOL[dtype])


def _tensors(result: object) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]
