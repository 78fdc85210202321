"""``fuse_fp8_linear`` finds products of fp8 operands, in float or by ``torch._scaled_mm``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import compilepass as cp
from compilepass.comparison import compare
from compilepass.kernels.native import FP8
from compilepass.testing import expect_matches

IN, OUT = 64, 48
FX = cp.CompilationConfig(backend="fx")
PASS = "fuse_fp8_linear"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = {"rows": (5, IN), "batch": (2, 3, IN), "token": (1, 1, IN)}
SMALLEST = 1e-5

#: a linear layer: ``(x, wq, wscale, bias)``, with a scale for each channel and one for all inputs
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """A scale for each token."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / 448.0
    return (x.float() / scale).clamp(-448, 448).to(FP8), scale


def with_known_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.full((1,), 0.02)
    return (x.float() / scale).clamp(-448, 448).to(FP8), scale


def tokens_in_float(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = quantised(x)
    return ((xq.float() @ wq.float().t()) * xs * ws + b.float()).to(x.dtype)


def tokens_without_bias(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = quantised(x)
    return (ws * (xs * torch.matmul(xq.float(), wq.float().mT))).to(x.dtype)


def known_scale_in_float(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = with_known_scale(x)
    return ((xq.float() @ wq.float().t()) * xs * ws + b.float()).to(x.dtype)


def known_scales_without_bias(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = with_known_scale(x)
    return ((xq.float() @ wq.float().t()) * xs * ws[:1]).to(x.dtype)


def one_scale_for_the_weight(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = quantised(x)
    return ((xq.float() @ wq.float().t()) * xs * ws[0] + b.float()).to(x.dtype)


def scaled_mm(xq: Tensor, wq: Tensor, xs: Tensor, ws: Tensor, **named: Any) -> Tensor:
    out = torch._scaled_mm(xq.reshape(-1, IN), wq.t(), xs, ws, **named)
    return out.view(*xq.shape[:-1], -1)


def tokens_by_scaled_mm(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = quantised(x)
    return scaled_mm(xq, wq, xs.view(-1, 1), ws.unsqueeze(0), bias=b, out_dtype=x.dtype)


def tokens_by_scaled_mm_fast(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = quantised(x)
    columns = ws.view(1, -1)
    return scaled_mm(xq, wq, xs.view(-1, 1), columns, out_dtype=x.dtype, use_fast_accum=True)


def known_scale_by_scaled_mm(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = with_known_scale(x)
    return scaled_mm(xq, wq, xs, ws[:1], bias=b, out_dtype=x.dtype)


def known_scale_without_bias_by_scaled_mm(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = with_known_scale(x)
    return scaled_mm(xq, wq, xs.squeeze(0), ws[0], out_dtype=x.dtype)


LAYERS: tuple[Layer, ...] = (
    tokens_in_float,
    tokens_without_bias,
    known_scale_in_float,
    known_scales_without_bias,
    one_scale_for_the_weight,
    tokens_by_scaled_mm,
    tokens_by_scaled_mm_fast,
    known_scale_by_scaled_mm,
    known_scale_without_bias_by_scaled_mm,
)


def tensors(dtype: torch.dtype, shape: tuple[int, ...] = (5, IN)) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    weight, scales = torch.randn(OUT, IN).to(FP8), torch.rand(OUT) / 10
    return torch.randn(shape).to(dtype), weight, scales, torch.randn(OUT).to(dtype)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_spelling_becomes_one_call(
    dtype: torch.dtype, shape: str, dynamic: bool | None
) -> None:
    def every(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> list[Any]:
        return [layer(x + i, wq, ws, b) for i, layer in enumerate(LAYERS)]

    args = tensors(dtype, SHAPES[shape])
    config = FX.model_copy(update={"dynamic": dynamic, "expect": {PASS: len(LAYERS)}})
    with torch.no_grad():
        found, wanted = cp.compile(every, config)(*args), every(*args)
    tolerance = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_the_error_of_a_layer_does_not_grow() -> None:
    config = FX.model_copy(update={"expect": {PASS: 1}})
    compared = compare(tokens_in_float, tensors(torch.bfloat16), config)
    assert compared.ok(), compared.explain()


def test_the_layer_that_ships_fuses_where_its_op_is_off() -> None:
    with cp.use_config(cp.CompilationConfig(custom_ops=["none"])):
        layer = cp.layers.Fp8Linear.from_linear(torch.nn.Linear(IN, OUT))
    x = torch.randn(3, IN)
    with torch.no_grad():
        fast = cp.compile(layer, FX)
        torch.testing.assert_close(fast(x), layer(x))
    expect_matches(fast, {PASS: 1})


def another_fp8(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = quantised(x)
    return (xq.float() @ wq.to(torch.float8_e5m2).float().t()) * xs * ws


def a_scale_for_each_input(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = quantised(x)
    return (xq.float() @ (wq.float() * ws.repeat(2)[:IN]).t()) * xs


def product_wanted(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Any:
    xq, xs = quantised(x)
    out = xq.float() @ wq.float().t()
    return out * xs * ws, out


def with_a_scale_of_the_result(x: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    xq, xs = with_known_scale(x)
    one = torch.ones(())
    return torch._scaled_mm(
        xq, wq.t(), xs, ws[:1], scale_result=one, out_dtype=torch.bfloat16
    ).float()


#: why the pass says that it did not fire
NEAR: dict[str, tuple[Layer, str]] = {
    fn.__name__: (fn, code)
    for fn, code in (
        (another_fp8, "dtype"),
        (a_scale_for_each_input, "op"),
        (product_wanted, "extra_user"),
        (with_a_scale_of_the_result, "arity"),
    )
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_nearly_that_is_left_alone_and_told(name: str) -> None:
    layer, code = NEAR[name]
    args = tensors(torch.float32)
    with torch.no_grad():
        fast = cp.compile(layer, FX)
        found, wanted = fast(*args), layer(*args)
    expect_matches(fast, {PASS: 0})
    told = {n.code for n in cp.report(fast).near_misses if n.pass_name == PASS}
    assert code in told, told
    torch.testing.assert_close(found, wanted)
