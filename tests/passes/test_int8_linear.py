"""``fuse_int8_linear`` finds products of int8 rows and weights, in float or by ``_int_mm``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import compilepass as cp
from compilepass.comparison import compare
from compilepass.testing import expect_matches, graph_of

IN, OUT = 64, 48
FX = cp.CompilationConfig(backend="fx")
PASS = "fuse_int8_linear"
SHAPES = {"rows": (5, IN), "batch": (2, 3, IN), "token": (1, 1, IN)}

#: a linear layer: ``(xq, xscale, wq, wscale, bias)``, of the dtype of the bias
Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def in_float(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    return ((xq.float() @ wq.float().t()) * xs * ws + b.float()).to(b.dtype)


def in_float_without_bias(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    return (ws * ((xq.float() @ wq.float().t()) * xs)).to(b.dtype)


def product(xq: Tensor, wq: Tensor) -> Tensor:
    rows = torch._int_mm(xq.reshape(-1, IN), wq.t())
    return rows.view(*xq.shape[:-1], -1)


def int_mm(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    return (product(xq, wq).float() * xs * ws + b).to(b.dtype)


def int_mm_without_bias(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    return (product(xq, wq) * xs * ws).to(b.dtype)


def rounded_between_the_scales(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    return ((product(xq, wq) * xs).to(b.dtype) * ws + b).to(b.dtype)


def moved(xq: Tensor, wq: Tensor) -> Tensor:
    """As torchao does on the CPU."""
    columns = wq.t()
    out = torch._int_mm((xq.int() + 128).to(torch.uint8).reshape(-1, IN), columns)
    out = out - 128 * columns.sum(0, keepdim=True, dtype=torch.int32)
    return out.view(*xq.shape[:-1], -1)


def moved_to_unsigned(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    return (moved(xq, wq).float() * xs * ws + b).to(b.dtype)


def moved_and_rounded(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    return ((moved(xq, wq).float() * xs).to(b.dtype) * ws).to(b.dtype)


LAYERS: tuple[Layer, ...] = (
    in_float,
    in_float_without_bias,
    int_mm,
    int_mm_without_bias,
    rounded_between_the_scales,
    moved_to_unsigned,
    moved_and_rounded,
)


def tensors(dtype: torch.dtype, shape: tuple[int, ...] = (5, IN)) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    xq, wq = (torch.randint(-128, 128, s, dtype=torch.int8) for s in (shape, (OUT, IN)))
    scales = torch.rand(*shape[:-1], 1) / 100, torch.rand(OUT) / 100
    return xq, scales[0], wq, scales[1], torch.randn(OUT).to(dtype)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_spelling_becomes_one_call(
    dtype: torch.dtype, shape: str, dynamic: bool | None
) -> None:
    def every(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> list[Any]:
        return [layer(xq + i, xs, wq + i, ws, b) for i, layer in enumerate(LAYERS)]

    args = tensors(dtype, SHAPES[shape])
    config = FX.model_copy(update={"dynamic": dynamic, "expect": {PASS: len(LAYERS)}})
    with torch.no_grad():
        found, wanted = cp.compile(every, config)(*args), every(*args)
    tolerance = 1e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_the_error_of_a_layer_does_not_grow() -> None:
    args = tensors(torch.bfloat16)
    compared = compare(in_float, args, FX.model_copy(update={"expect": {PASS: 1}}))
    assert compared.ok(), compared.explain()


def test_nothing_of_the_move_to_unsigned_is_left() -> None:
    graph = graph_of(moved_to_unsigned, tensors(torch.float32), FX)
    called = {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
    assert "compilepass.int8_linear.default" in called
    assert not called & {"aten._int_mm.default", "aten.sum.dim_IntList", "aten.sub.Tensor"}


def moved_by_another_number(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    columns = wq.t()
    out = torch._int_mm((xq.int() + 128).to(torch.uint8), columns)
    return (out - 127 * columns.sum(0, keepdim=True, dtype=torch.int32)).float() * xs * ws


def sum_of_another_weight(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    out = torch._int_mm((xq.int() + 128).to(torch.uint8), wq.t())
    other = (wq + 1).t()
    return (out - 128 * other.sum(0, keepdim=True, dtype=torch.int32)).float() * xs * ws


def integers_wanted(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Any:
    out = product(xq, wq)
    return out.float() * xs * ws, out


def unsigned_rows(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    return (xq.view(torch.uint8).float() @ wq.float().t()) * xs * ws


def a_scale_for_each_input(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    return (xq.float() @ wq.float().t()) * ws.sum() * ws


#: why the pass says that it did not fire
NEAR: dict[str, tuple[Layer, str]] = {
    fn.__name__: (fn, code)
    for fn, code in (
        (moved_by_another_number, "literal"),
        (sum_of_another_weight, "binding"),
        (integers_wanted, "extra_user"),
        (unsigned_rows, "dtype"),
        (a_scale_for_each_input, "broadcast"),
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
