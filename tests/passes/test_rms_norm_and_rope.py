"""Norms and rotations as models of transformers have them beside the usual ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import compilepass as cp
from compilepass.testing import expect_matches

EPS = 1e-6


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def scaled(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def compiled(fn: Callable[..., Any], *args: Tensor) -> tuple[Tensor, cp.Report]:
    torch._dynamo.reset()
    fast = cp.compile(fn, cp.CompilationConfig(backend="fx"))
    with torch.no_grad():
        return fast(*args), cp.report(fast)


@pytest.mark.parametrize("tokens", [1, 5])
def test_heads_of_16_bits_are_rotated_by_tables_of_float32(tokens: int) -> None:
    """OLMo. With one token the exchange of tokens and heads moves nothing in memory."""

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.view(2, tokens, -1, 16).transpose(1, 2)
        return rotate(heads, cos, sin).to(x.dtype)

    torch.manual_seed(20240607)
    x = torch.randn(2, tokens, 64).bfloat16()
    args = (x, *torch.randn(2, 2, 1, tokens, 16))
    out, report = compiled(model, *args)
    expect_matches(report, fuse_rope=1)
    assert torch.equal(out, model(*args))


def test_the_sum_of_a_rotation_is_no_residual_of_the_norm_behind_it() -> None:
    """HunYuan."""

    def model(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return weight * scaled(rotate(x, cos, sin))

    torch.manual_seed(20240607)
    args = (torch.randn(2, 4, 5, 16), torch.randn(16), *torch.randn(2, 5, 16))
    out, report = compiled(model, *args)
    expect_matches(report, fuse_rope=1, fuse_rms_norm=1, fuse_add_rms_norm=0)
    torch.testing.assert_close(out, model(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_without_weight_is_taken(dtype: torch.dtype) -> None:
    """NanoChat, and DiffLlama's heads."""
    torch.manual_seed(20240607)
    x = torch.randn(4, 32).to(dtype)
    out, report = compiled(scaled, x)
    expect_matches(report, fuse_rms_norm=1)
    torch.testing.assert_close(out, scaled(x))
