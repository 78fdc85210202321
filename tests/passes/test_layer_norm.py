"""``fuse_layer_norm`` finds norms as PyTorch has them and as models write them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import compilepass as cp

WIDTH, EPS = 48, 1e-5
RTOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = {"rows": (5, WIDTH), "batch": (2, 3, WIDTH)}

Norm = Callable[[Tensor, Tensor, Tensor], Any]


def library(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), w, b, EPS)


def without_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), w, None, EPS)


def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), eps=1e-6)


def weight_and_one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), w + 1, b, EPS)


def by_mean_of_squares(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x32 = x.float()
    mean = x32.mean(-1, keepdim=True)
    variance = (x32 - mean).pow(2).mean(-1, keepdim=True)
    return (w.float() * ((x32 - mean) * torch.rsqrt(variance + EPS))).to(x.dtype)


def by_variance(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x32 = x.float()
    variance = x32.var(-1, keepdim=True, unbiased=False)
    normed = (x32 - x32.mean(-1, keepdim=True)) / torch.sqrt(variance + EPS)
    return (normed * w.float() + b.float()).to(x.dtype)


def by_both_at_once(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x32 = x.float()
    variance, mean = torch.var_mean(x32, -1, correction=0, keepdim=True)
    return ((x32 - mean) * (variance + EPS).rsqrt() * w.float() + b.float()).to(x.dtype)


def with_residual(norm: Norm) -> Norm:
    def added(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total = x + x.flip(0)
        return norm(total, w, b), total * 2

    added.__name__ = f"added_{norm.__name__}"
    return added


NORMS = (
    library,
    without_bias,
    plain,
    weight_and_one,
    by_mean_of_squares,
    by_variance,
    by_both_at_once,
)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "norm", [*NORMS, *map(with_residual, NORMS)], ids=lambda norm: norm.__name__
)
def test_each_spelling_becomes_one_kernel(norm: Norm, shape: str, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    args = [
        (torch.randn(SHAPES[shape]).to(d), torch.randn(WIDTH).to(d), torch.randn(WIDTH).to(d))
        for d in RTOL
    ]

    def each(*flat: Tensor) -> list[Any]:
        return [norm(*flat[i : i + 3]) for i in range(0, len(flat), 3)]

    config = cp.CompilationConfig(backend="fx", dynamic=dynamic)
    flat = [t for given in args for t in given]
    for t in flat:
        torch._dynamo.mark_static(t, t.dim() - 1)
    with torch.no_grad():
        fast = cp.compile(each, config)
        results = fast(*flat)
    assert cp.report(fast).matches["fuse_layer_norm"] == len(RTOL)
    for given, result, rtol in zip(args, results, RTOL.values(), strict=True):
        torch.testing.assert_close(result, norm(*given), rtol=rtol, atol=rtol)


def rounded_in_between(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + EPS) * w + b


def over_two_dims(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-2:], eps=EPS)


def of_a_sample(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + EPS).rsqrt() * w + b


def variance_used_elsewhere(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    inverse = torch.rsqrt(variance + EPS)
    return (x - mean) * inverse * w + b, inverse


#: why the pass says that it did not fire, where it came near
NEAR = {
    "rounded_in_between": (rounded_in_between, torch.bfloat16, None),
    "over_two_dims": (over_two_dims, torch.float32, None),
    "of_a_sample": (of_a_sample, torch.float32, "op"),
    "variance_used_elsewhere": (variance_used_elsewhere, torch.float32, "extra_user"),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_nearly_a_layer_norm_is_left_alone_and_told(name: str) -> None:
    norm, dtype, code = NEAR[name]
    args = torch.randn(2, 3, WIDTH).to(dtype), torch.randn(WIDTH).to(dtype), torch.zeros(WIDTH)
    args = (*args[:2], args[2].to(dtype))
    with torch.no_grad():
        fast = cp.compile(norm, cp.CompilationConfig(backend="fx"))
        result = fast(*args)
    report = cp.report(fast)
    assert report.matches["fuse_layer_norm"] == 0
    told = {n.code for n in report.near_misses if n.pass_name == "fuse_layer_norm"}
    assert code in told if code else not told
    torch.testing.assert_close(result, norm(*args))
