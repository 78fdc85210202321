"""``fuse_weight_only_linear`` finds int8 weights that a model dequantises in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import compilepass as cp
from compilepass.comparison import compare
from compilepass.testing import expect_matches

IN, OUT = 64, 48
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = {"rows": (5, IN), "batch": (2, 3, IN), "token": (1, 1, IN)}
FX = cp.CompilationConfig(backend="fx", passes=["-fuse_linear"])
PASS = "fuse_weight_only_linear"

#: a linear layer: ``(x, weight, scale, bias)``; scale is float32 ``[OUT]``
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def gpt_fast(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * s.to(x.dtype)


def scaled_output(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return b + s.to(x.dtype) * F.linear(x, w.to(x.dtype))


def transposed_before_the_cast(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(x, w.t().to(x.dtype)) * s.to(x.dtype) + b


def scaled_weight(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w * s.to(x.dtype).unsqueeze(1), b)


def scaled_weight_without_bias(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(x, (w.to(x.dtype) * s.to(x.dtype).view(-1, 1)).mT)


def weight_scaled_in_float(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, (w.float() * s[:, None]).to(x.dtype), b)


def output_scaled_in_float(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return (F.linear(x, w.to(x.dtype)) * s + b).to(x.dtype)


def rounded_before_the_bias(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return (F.linear(x, w.to(x.dtype)).float() * s).to(x.dtype) + b


def all_in_float(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return ((x.float() @ w.float().t()) * s + b.float()).to(x.dtype)


def in_the_op_itself(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return cp.kernels.native.weight_only_int8_linear(x, w, s, None)


LAYERS: tuple[Layer, ...] = (
    gpt_fast,
    scaled_output,
    transposed_before_the_cast,
    scaled_weight,
    scaled_weight_without_bias,
    weight_scaled_in_float,
    output_scaled_in_float,
    rounded_before_the_bias,
    all_in_float,
    in_the_op_itself,
)


def tensors(dtype: torch.dtype, shape: tuple[int, ...] = (5, IN)) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8)
    scale, bias = torch.rand(OUT) / 100, torch.randn(OUT).to(dtype)
    return torch.randn(shape).to(dtype), weight, scale, bias


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_spelling_becomes_one_call_within_the_bound(
    dtype: torch.dtype, shape: str, dynamic: bool | None
) -> None:
    def every(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> list[Any]:
        return [layer(x + i, w + i, s, b) for i, layer in enumerate(LAYERS)]

    config = FX.model_copy(update={"dynamic": dynamic, "expect": {PASS: len(LAYERS)}})
    compared = compare(every, tensors(dtype, SHAPES[shape]), config)
    assert compared.ok(), compared.explain()


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_no_widened_weight_is_left(layer: Layer) -> None:
    config = FX.model_copy(update={"expect": {PASS: 1}})
    graph = cp.testing.graph_of(layer, tensors(torch.bfloat16), config)
    called = {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
    assert called <= {
        "compilepass.weight_only_int8_linear.default",
        "prims.convert_element_type.default",  # of the scale
        "aten.reshape.default",
    }


def test_the_layer_that_ships_fuses_where_its_op_is_off() -> None:
    with cp.use_config(cp.CompilationConfig(custom_ops=["none"])):
        layer = cp.layers.WeightOnlyInt8Linear.from_linear(torch.nn.Linear(IN, OUT))
    x = torch.randn(3, IN)
    with torch.no_grad():
        fast = cp.compile(layer, FX)
        torch.testing.assert_close(fast(x), layer(x))
    expect_matches(fast, {PASS: 1})


def zero_points(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, (w.to(x.dtype) - b[:, None]) * s[:, None].to(x.dtype))


def scales_of_groups(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    groups = w.to(x.dtype).view(OUT, 4, -1) * s.to(x.dtype)[:4, None]
    return F.linear(x, groups.view(OUT, IN), b)


def scales_of_inputs(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * s.to(x.dtype).repeat(2)[:IN], b)


def one_scale(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * s.to(x.dtype)[:1]


def unsigned(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w.view(torch.uint8).to(x.dtype)) * s.to(x.dtype)


def product_used_elsewhere(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Any:
    out = F.linear(x, w.to(x.dtype))
    return out * s.to(x.dtype), out


def lies_by_columns(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    stored = w.reshape(IN, OUT).contiguous() + 0
    return F.linear(x, stored.t().to(x.dtype)) * s.to(x.dtype)


def rounded_twice(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, (w.to(x.dtype) * s[:, None]).half().to(x.dtype))


#: why the pass says that it did not fire, where it came near
NEAR: dict[str, tuple[Layer, str]] = {
    fn.__name__: (fn, code)
    for fn, code in (
        (zero_points, "op"),
        (scales_of_groups, "broadcast"),
        (scales_of_inputs, "broadcast"),
        (one_scale, "broadcast"),
        (unsigned, "dtype"),
        (product_used_elsewhere, "extra_user"),
        (lies_by_columns, "check"),
        (rounded_twice, "dtype"),
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
    assert code in told
    torch.testing.assert_close(found, wanted)


def test_a_graph_that_trains_is_left_alone() -> None:
    x, w, s, b = tensors(torch.float32)
    fast = cp.compile(scaled_output, FX)
    fast(x.requires_grad_(), w, s, b).sum().backward()  # type: ignore[no-untyped-call]
    expect_matches(fast, {PASS: 0})
    torch.testing.assert_close(x.grad, (w.float() * s[:, None]).sum(0).expand(5, -1))
