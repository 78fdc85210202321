"""Each shipped op on this machine: against fp64, native, its fake, and opcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compilepass import kernels
from compilepass.errors import KernelError
from compilepass.kernels import scaled_mm
from compilepass.kernels.native import FP8

from .cases import (
    CASES,
    DTYPES,
    EPS,
    FP64_ATOL,
    FP64_RTOL,
    GELU_ATOL,
    LAYER_NORM_ATOL,
    NORMED_AND_ROTATED,
    SHAPES,
    TWO_ULP,
    as_numbers,
    mapped,
    op_of,
    outputs,
    strided,
    to_double,
)

every_case = pytest.mark.parametrize("name", CASES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
INF, NAN = float("inf"), float("nan")
NOT_FOR_EXTREMES = (
    "int8_linear",
    "fp8_linear",
    # a row's neighbours in a product, of which no digits are left beside 3e38
    "int8_dynamic_linear",
    "weight_only_int8_linear",
    "linear",
    # oneDNN, which native's gelu of a dense tensor calls, makes a NaN of an infinity
    "gelu_mul",
    # a scale of one small value is of digits that native loses
    "gelu_and_mul_group",
    # has no digits left where a residual is added to a row of 1e4
    "fused_add_layer_norm",
)
# A result may be small beside what it is the difference of.
LINEAR = ("linear", "int8_dynamic_linear", "weight_only_int8_linear", "fp8_linear")
SUBTRACTS = ("rota", *NORMED_AND_ROTATED, "fused_add_layer_norm", *LINEAR)


def native_of(name: str) -> Any:
    op = kernels.find(op_of(name))
    assert op is not None
    return op.native


def slack_of(name: str, shape: tuple[int, ...]) -> float:
    """What native may lose to cancellation, and the kernel does not."""
    if name.startswith("gelu"):
        return GELU_ATOL
    if "layer_norm" in name and shape[-1] == 1:
        return LAYER_NORM_ATOL
    return 2e-6


def scale_of(name: str, args: tuple[Any, ...]) -> float:
    """The scale that an op was given, or 0."""
    given = [a for a in args if isinstance(a, Tensor) and a.shape == (1,)]
    return float(given[0]) if "static" in name else 0.0


def _spread(scales: Tensor, width: int) -> Tensor:
    """A scale for each element of rows, of those for its groups."""
    return scales.repeat_interleave(width // scales.shape[-1], -1)


def assert_like_native(
    ours: tuple[Tensor, ...],
    native: tuple[Tensor, ...],
    *,
    atol: float = 2e-6,
    subtracts: bool = False,
    scale: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Equal but for the odd neighbour; more than a few of them is another rounding.

    With ``subtracts``, a neighbour is one of the largest value. ``scale`` is that of quantised
    results which come without, ``dtype`` that of what was quantised.
    """
    for mine, theirs in zip(ours, native, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        if mine.numel() == 0:
            continue
        if mine.dtype == torch.int8:
            steps = (mine.short() - theirs.short()).abs()
            assert (steps <= 1 + atol / (scale or ours[1])).all()
            continue
        if mine.dtype == torch.int32:
            assert ((mine - theirs).abs() <= 1 + atol / ours[1]).all()
            continue
        if mine.dtype == FP8:
            mine, theirs = mine.float(), theirs.float()
            step = (theirs.abs() / 8).clamp(min=2.0**-9)
            near = atol / torch.as_tensor(scale or _spread(ours[1], mine.shape[-1]))
            assert ((mine - theirs).abs() <= step + near).all()
            assert ((mine != theirs) & (near < step)).sum() <= 2 + 0.02 * mine.numel()
            continue
        # a scale is of one value, which may be a neighbour
        rtol = TWO_ULP[mine.dtype if ours[0].dtype != FP8 else dtype]
        near = max(atol, rtol * float(theirs.abs().amax())) if subtracts else atol
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=near)
        if mine.dtype != torch.float32:
            differ = (mine.double() - theirs.double()).abs() > atol
            assert differ.sum() <= 2 + 0.005 * mine.numel()


@every_shape
@every_dtype
@every_case
def test_kernel_is_as_near_to_fp64_as_its_dtype_allows(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    case = CASES[name]
    args = case.inputs(shape, dtype)
    out = outputs(op_of(name)(*args))
    wanted = case.oracle(*mapped(args, to_double))
    subtracts = name.startswith(SUBTRACTS) and args[0].numel()
    step = torch.zeros(())
    if case.numbers is not None:
        numbers = case.numbers(args, out)
        out, step = (numbers.values, *numbers.rest), numbers.within
    for i, (mine, exact) in enumerate(zip(out, wanted, strict=True)):
        slack = step if i == 0 else torch.zeros(())
        size = FP64_RTOL[dtype] * (exact.abs() + (exact.abs().amax() if subtracts else 0))
        allowed = FP64_ATOL[dtype] + size + slack
        assert bool(((mine.double() - exact).abs() <= allowed).all())


@every_shape
@every_dtype
@every_case
def test_kernel_rounds_as_native_does(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    args = CASES[name].inputs(shape, dtype)
    assert_like_native(
        outputs(op_of(name)(*args)),
        outputs(native_of(name)(*args)),
        atol=slack_of(name, shape),
        subtracts=name.startswith((*NORMED_AND_ROTATED, *LINEAR)),
        scale=scale_of(name, args),
        dtype=dtype,
    )


@every_dtype
def test_sum_and_quantisation_equal_native_exactly(dtype: torch.dtype) -> None:
    x, residual = (torch.randn(64, 1000) * 3).to(dtype), torch.randn(64, 1000).to(dtype)
    weight = torch.randn(1000).to(dtype)
    ops, native = torch.ops.compilepass, kernels.native
    for mine, theirs in zip(ops.quant_int8(x), native.quant_int8(x), strict=True):
        assert torch.equal(mine, theirs)
    *_, total = torch.ops.compilepass.fused_add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)


@every_dtype
@pytest.mark.parametrize("name", [n for n in CASES if "quant_" in n])
def test_quantisation_alone_equals_native_exactly(name: str, dtype: torch.dtype) -> None:
    for size in (1e-4, 1.0, 300.0):
        x, *settings = CASES[name].inputs((64, 1024 + 64), dtype)
        out = outputs(op_of(name)(x * size, *settings))
        for mine, theirs in zip(out, outputs(native_of(name)(x * size, *settings)), strict=True):
            assert torch.equal(as_numbers(mine), as_numbers(theirs))


def test_every_half_between_two_fp8_numbers_rounds_as_pytorch_rounds_it() -> None:
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    halves = (numbers[1:] + numbers[:-1]) / 2
    near = [numbers, halves, halves.nextafter(numbers[1:]), halves.nextafter(numbers[:-1])]
    x = torch.cat((*near, torch.tensor([464.0, 465.0, 1e30, INF, NAN, 1e-40])))
    x = torch.cat((x, -x))
    out = torch.ops.compilepass.static_quant_fp8(x, torch.ones(1))
    wanted = x.clamp(-448, 448).to(FP8)
    numbers = ~x.isnan()
    assert torch.equal(out.float()[numbers], wanted.float()[numbers])
    assert out.float()[~numbers].isnan().all()


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-40, 1e-30, 1e30, INF, NAN])
def test_any_scale_that_is_given_quantises_as_native(scale: float) -> None:
    x = torch.cat((torch.randn(1000) * 3, torch.tensor([0.0, 1e30, -1e38, 3e-39, INF, -INF])))
    for name in ("static_quant_fp8", "static_quant_int8"):
        op, given = getattr(torch.ops.compilepass, name), torch.tensor([scale])
        out, wanted = op(x, given), getattr(kernels.native, name)(x, given)
        defined = ~(x / scale).isnan()
        assert torch.equal(as_numbers(out)[defined], as_numbers(wanted)[defined])


def test_zero_is_exact_with_a_zero_point() -> None:
    x = torch.cat((torch.rand(8, 64) + 5, torch.zeros(8, 1)), -1)
    q, scale, zero_point = torch.ops.compilepass.asymmetric_quant_int8(x)
    assert torch.equal(q[:, -1:], zero_point.to(torch.int8))
    assert ((q - zero_point) * scale - x).abs().max() <= 0.51 * scale.max()


@every_dtype
@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("linear")])
def test_kernel_takes_inputs_of_any_stride(name: str, dtype: torch.dtype) -> None:
    args = CASES[name].inputs((3, 5, 24), dtype)
    dense = outputs(op_of(name)(*args))
    scale = scale_of(name, args)
    assert_like_native(
        outputs(op_of(name)(*mapped(args, strided))), dense, scale=scale, dtype=dtype
    )
    for out in outputs(op_of(name)(*mapped(args, strided))):
        assert out.is_contiguous()


@every_dtype
def test_a_few_rows_and_a_bias_of_any_stride_are_multiplied(dtype: torch.dtype) -> None:
    x, w, bias = CASES["linear"].inputs((2, 24), dtype)
    linear = torch.ops.compilepass.linear
    assert torch.equal(linear(strided(x), w, strided(bias)), linear(x, w, bias))


@every_dtype
@every_case
def test_fake_says_what_the_kernel_returns(name: str, dtype: torch.dtype) -> None:
    for shape in ((0, 8), (1, 8), (8,), (2, 3, 8)):
        for args in (
            CASES[name].inputs(shape, dtype),
            mapped(CASES[name].inputs(shape, dtype), strided),
        ):
            real = outputs(op_of(name)(*args))
            with FakeTensorMode() as mode:
                fake = outputs(op_of(name)(*mapped(args, mode.from_tensor)))
            for a, b in zip(real, fake, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@every_case
def test_opcheck(name: str) -> None:
    check_registration(name)


def check_registration(name: str) -> None:
    args = CASES[name].inputs((3, 16), torch.float32)
    # what checks the schema multiplies the inputs, which fp8 does not know
    checks = ["test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"]
    if not any(isinstance(a, Tensor) and a.dtype == FP8 for a in args):
        checks.append("test_schema")
    torch.library.opcheck(op_of(name), args, test_utils=checks)


def assert_extremes_like_native(name: str, args: tuple[Any, ...]) -> None:
    """What is defined of the results is native's: a NaN has no integer."""
    ours = outputs(op_of(name)(*args))
    native = outputs(native_of(name)(*args))
    for mine, theirs in zip(ours, native, strict=True):
        if mine.dtype in (torch.int8, torch.int32):
            if "static" in name:
                given = [a for a in args if getattr(a, "dtype", None) != torch.int32]
                as_fp8 = name.replace("_asymmetric", "").replace("int8", "fp8")
                fp8 = outputs(native_of(as_fp8)(*given))[0]
                defined = ~fp8.float().isnan()
            else:
                defined = native[1].isfinite().expand(mine.shape)
            assert ((mine.int() - theirs.int()).abs()[defined] <= 1).all()
        elif mine.dtype == FP8:
            torch.testing.assert_close(
                mine.float(), theirs.float(), rtol=0.13, atol=2.0**-9, equal_nan=True
            )
        else:
            torch.testing.assert_close(mine, theirs, rtol=4e-6, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("fill", [1e-30, 1e4, 3e38, INF, -INF, NAN])
@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith(NOT_FOR_EXTREMES)])
def test_extreme_values_give_what_native_gives(name: str, fill: float) -> None:
    args = CASES[name].inputs((4, 33), torch.float32)
    args[0][1, ..., 3] = fill
    args[0][2] = fill
    assert_extremes_like_native(name, args)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_keeps_the_digits_of_its_negative_tail(approximate: str) -> None:
    gate = torch.linspace(-5, 5, 1001)
    out = torch.ops.compilepass.gelu_and_mul(torch.cat((gate, torch.ones_like(gate))), approximate)
    exact = torch.nn.functional.gelu(gate.double(), approximate=approximate)
    if approximate == "none":
        exact = gate.double() * torch.special.ndtr(gate.double())
    torch.testing.assert_close(out.double(), exact, rtol=2e-5, atol=0)


def test_silu_is_monotonic_through_the_whole_range_of_exp() -> None:
    gate = torch.linspace(-120, 120, 4001)
    out = torch.ops.compilepass.silu_and_mul(torch.cat((gate, torch.ones_like(gate))))
    exact = gate.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-36)


@pytest.mark.parametrize("args", ["mixed", "double"])
def test_what_the_kernel_does_not_take_runs_native(args: str) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    inputs = (x.bfloat16(), weight) if args == "mixed" else (x.double(), weight.double())
    op = kernels.find("compilepass::rms_norm")
    assert op is not None
    assert op.supports("cpu", *inputs, EPS) is not None
    out = torch.ops.compilepass.rms_norm(*inputs, EPS)
    assert torch.equal(out, kernels.native.rms_norm(*inputs, EPS))


@pytest.mark.parametrize("width", [1, 63, 64, 65, 4096])
def test_int8_linear_is_exact_on_extreme_values(width: int) -> None:
    for x, w in ((127, 127), (-128, 127), (127, -128), (-128, -128)):
        for rows, columns in ((1, 1), (4, 5), (9, 70)):
            xq = torch.full((rows, width), x, dtype=torch.int8)
            wq = torch.full((columns, width), w, dtype=torch.int8)
            ones = torch.ones(rows, 1), torch.ones(columns)
            out = torch.ops.compilepass.int8_linear(xq, ones[0], wq, ones[1], None, torch.float32)
            assert torch.equal(out, torch.full((rows, columns), float(x * w * width)))


def test_int8_linear_sees_a_weight_that_changed_in_place() -> None:
    xq, xscale, wq, wscale, bias, dtype = CASES["int8_linear"].inputs((4, 64), torch.float32)
    before = torch.ops.compilepass.int8_linear(xq, xscale, wq, wscale, bias, dtype)
    wq.data.zero_()
    after = torch.ops.compilepass.int8_linear(xq, xscale, wq, wscale, bias, dtype)
    assert not torch.equal(before, after)
    assert torch.equal(after, bias.expand(4, -1))


#: (rows, width, columns): up to some rows weights are read as they lie, from there on transposed
WIDENED = (
    *((1, 1, 1), (1, 300, 37), (2, 33, 6), (7, 40, 35), (13, 513, 129)),
    *((25, 64, 160), (64, 257, 32)),
)


@every_dtype
@pytest.mark.parametrize(("rows", "width", "columns"), WIDENED)
@pytest.mark.parametrize("weight", [torch.int8, FP8], ids=str)
def test_a_product_of_small_integers_is_exact(
    weight: torch.dtype, rows: int, width: int, columns: int, dtype: torch.dtype
) -> None:
    x = torch.randint(-2, 3, (rows, width)).to(dtype)
    w = torch.randint(-2, 3, (columns, width))
    ops, scale = torch.ops.compilepass, torch.full((columns,), 0.25)
    if weight == FP8:
        out = ops.fp8_linear(x.to(FP8), torch.ones(1), w.to(FP8), scale, None, torch.float32)
    else:
        out = ops.weight_only_int8_linear(x, w.to(weight), scale, None).float()
    exact = (x.double() @ w.double().t()) / 4
    assert torch.equal(out, exact.to(torch.float32 if weight == FP8 else dtype).float())


def test_every_fp8_number_is_read_as_pytorch_reads_it() -> None:
    numbers = torch.arange(256).to(torch.uint8).view(FP8).unsqueeze(-1)
    one = torch.ones(1, 1).to(FP8)
    args = (torch.ones(1), one, torch.ones(1), None, torch.float32)
    out = torch.ops.compilepass.fp8_linear(numbers, *args)
    torch.testing.assert_close(out, numbers.float(), rtol=0, atol=0, equal_nan=True)
    by = torch.ops.compilepass.fp8_linear(
        one, torch.ones(1), numbers, torch.ones(256), None, torch.float32
    )
    torch.testing.assert_close(by, out.t(), rtol=0, atol=0, equal_nan=True)


def test_scaled_mm_multiplies_as_native_does() -> None:
    x, xscale, w, wscale, bias, dtype = CASES["fp8_linear"].inputs((2, 5, 64), torch.bfloat16)
    w, wscale, bias = w[:32], wscale[:32], bias[:32]
    for scales in (xscale, torch.full((1,), 0.5)):
        for added in (bias, None):
            args = x, scales, w, wscale, added, dtype
            assert scaled_mm.supports(*args) is None
            found, native = scaled_mm.fp8_linear(*args), kernels.native.fp8_linear(*args)
            torch.testing.assert_close(found, native, rtol=2.0**-6, atol=1e-2)
    for wrong in ((x, xscale, w[:9], wscale[:9], None, dtype), (*args[:5], torch.float32)):
        assert scaled_mm.supports(*wrong) is not None


@every_dtype
@pytest.mark.parametrize("residual", [False, True])
def test_int8_dynamic_linear_equals_its_chain_exactly(dtype: torch.dtype, residual: bool) -> None:
    args = CASES["int8_dynamic_linear/residual"].inputs((19, 200), dtype)
    x, wq, wscale, bias, added = args
    q, scale = torch.ops.compilepass.quant_int8(x)
    chain = torch.ops.compilepass.int8_linear(q, scale, wq, wscale, bias, dtype)
    wanted = added + chain if residual else chain
    found = torch.ops.compilepass.int8_dynamic_linear(*args[: 5 if residual else 4])
    assert torch.equal(found, wanted)


def _heads(width: int) -> tuple[Tensor, ...]:
    return torch.randn(2, 3, width), torch.randn(2, 1, width)


def _int8(*size: int) -> Tensor:
    return torch.ones(size, dtype=torch.int8)


def _tables(half: int) -> tuple[Tensor, ...]:
    return torch.randn(2, half), torch.randn(2, half)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("rms_norm", (torch.ones(2, 8), torch.ones(7), EPS)),
        ("fused_add_rms_norm", (torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), EPS)),
        ("silu_and_mul", (torch.ones(2, 7),)),
        ("gelu_and_mul", (torch.ones(2, 8), "tan")),
        ("gelu_mul", (torch.ones(2, 8), torch.ones(2, 8), "tan")),
        ("silu_mul", (torch.ones(2, 8), torch.ones(8, 2))),
        ("rms_norm", (torch.ones(2, 8), torch.ones(8), EPS, "gema")),
        ("rotate", (torch.ones(2, 8), torch.ones(2, 10), torch.ones(2, 10))),
        ("rotate", (torch.ones(2, 8), torch.ones(2, 7), torch.ones(2, 7))),
        ("rotate", (torch.ones(2, 8), torch.ones(2, 8), torch.ones(2, 4))),
        ("rotate", (torch.ones(2, 8), torch.ones(3, 8), torch.ones(3, 8))),
        ("rotate", (torch.ones(8), torch.ones(2, 8), torch.ones(2, 8))),
        ("swigluoai_and_mul", (torch.ones(2, 7),)),
        ("fatrelu_and_mul", (torch.ones(2, 7), 0.0)),
        ("gelu_and_mul_dynamic_int8_quant", (torch.ones(2, 8), "tan")),
        ("weight_only_int8_linear", (torch.ones(2, 8), _int8(3, 7), torch.ones(3), None)),
        ("int8_dynamic_linear", (torch.ones(2, 8), _int8(8), torch.ones(8), None)),
        ("linear", (torch.ones(2, 8), torch.ones(3, 7))),
        ("linear", (torch.ones(2, 8), torch.ones(3, 8), torch.ones(2))),
        (
            "int8_dynamic_linear",
            (torch.ones(2, 8), _int8(3, 8), torch.ones(3), None, torch.ones(2, 8)),
        ),
        ("static_quant_int8", (torch.ones(2, 8), torch.ones(2))),
        ("static_quant_int8", (torch.ones(2, 8), torch.ones(1), torch.ones(8, dtype=torch.int32))),
        ("static_quant_fp8", (torch.ones(2, 8), torch.ones(8))),
        ("group_quant_fp8", (torch.ones(2, 8), 3)),
        ("silu_and_mul_group_fp8_quant", (torch.ones(2, 16), 16)),
        ("rms_norm_static_fp8_quant", (torch.ones(2, 8), torch.ones(8), torch.ones(8), EPS)),
        ("layer_norm", (torch.ones(2, 8), torch.ones(7), None, EPS)),
        ("layer_norm", (torch.ones(2, 8), None, torch.ones(1), EPS)),
        ("fused_add_layer_norm", (torch.ones(2, 8), torch.ones(3, 8), None, None, EPS)),
        ("qk_norm_rope", (*_heads(8), torch.ones(8), torch.ones(7), *_tables(4), EPS, False)),
        ("qk_norm_rope", (*_heads(8), torch.ones(8), torch.ones(8), *_tables(5), EPS, False)),
        ("rms_norm_rotate", (torch.ones(2, 8), torch.ones(7), *_tables(8), EPS)),
        ("rms_norm_rotate", (torch.ones(2, 8), torch.ones(8), *_tables(10), EPS)),
        ("rms_norm_rotate", (torch.ones(2, 8), torch.ones(8), *_tables(8), EPS, "gema")),
    ],
)
def test_arguments_that_do_not_fit_are_refused_eager_and_traced(
    op: str, args: tuple[Any, ...]
) -> None:
    overload = getattr(torch.ops.compilepass, op)
    with pytest.raises(RuntimeError):
        overload(*args)
    with FakeTensorMode() as mode, pytest.raises(KernelError):
        overload(*mapped(args, mode.from_tensor))


@every_dtype
@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("rota")])
def test_rotation_equals_native_exactly(name: str, dtype: torch.dtype) -> None:
    for width in (4, 16, 17, 64):
        args = CASES[name].inputs((5, 7, width), dtype)
        for mine, theirs in zip(
            outputs(op_of(name)(*args)), outputs(native_of(name)(*args)), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_tables_of_rotation_broadcast_along_any_leading_dim() -> None:
    x = torch.randn(2, 3, 5, 16)
    for leading in ((), (1,), (5,), (3, 1), (1, 5), (2, 1, 5), (2, 3, 5), (2, 1, 1)):
        cos, sin = torch.randn(2, *leading, 16)
        wide = (t.expand(x.shape) for t in (cos, sin))
        rotate = torch.ops.compilepass.rotate
        assert torch.equal(rotate(x, cos, sin), rotate(x, *wide))
        assert torch.equal(rotate(x, cos, sin), kernels.native.rotate(x, cos, sin))


def test_rotary_embedding_rounds_its_tables_to_the_dtype_of_the_heads() -> None:
    q, k = torch.randn(5, 2, 16).bfloat16(), torch.randn(5, 1, 16).bfloat16()
    cos, sin = torch.randn(2, 5, 8)
    ours = torch.ops.compilepass.rotary_embedding(q, k, cos, sin, False)
    for mine, theirs in zip(
        ours, kernels.native.rotary_embedding(q, k, cos, sin, False), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotary_passes_the_rest_of_a_head_through(interleaved: bool) -> None:
    q, k = torch.randn(5, 2, 16), torch.randn(5, 1, 16)
    angles = torch.rand(5, 4)
    out, _ = torch.ops.compilepass.rotary_embedding(q, k, angles.cos(), angles.sin(), interleaved)
    assert torch.equal(out[..., 8:], q[..., 8:])
    torch.testing.assert_close(out.norm(dim=-1), q.norm(dim=-1))
    pairs = out[..., :8].view(5, 2, 4, 2) if interleaved else out[..., :8].view(5, 2, 2, 4).mT
    source = q[..., :8].view(5, 2, 4, 2) if interleaved else q[..., :8].view(5, 2, 2, 4).mT
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    wanted = torch.view_as_complex(source.contiguous()) * turn
    torch.testing.assert_close(torch.view_as_complex(pairs.contiguous()), wanted)


@every_dtype
@pytest.mark.parametrize("variant", ["llama", "torch", "gemma"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_qk_norm_rope_equals_its_two_kernels_exactly(
    dtype: torch.dtype, variant: str, interleaved: bool
) -> None:
    ops = torch.ops.compilepass
    qkv = torch.randn(5, 6, 40).to(dtype)
    q, k, _ = qkv.split((3, 2, 1), -2)  # as heads lie behind a projection
    weights = torch.randn(2, 40).to(dtype)
    for half in (20, 7):  # whole heads, and a part of them
        tables = torch.randn(2, 5, half)
        normed = [ops.rms_norm(x, w, EPS, variant) for x, w in zip((q, k), weights, strict=True)]
        wanted = ops.rotary_embedding(*normed, *tables, interleaved)
        found = ops.qk_norm_rope(q, k, *weights, *tables, EPS, interleaved, variant)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine, theirs)


@every_dtype
@pytest.mark.parametrize("variant", ["llama", "torch", "gemma"])
@pytest.mark.parametrize("per_pair", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rms_norm_rotate_equals_its_two_kernels_exactly(
    dtype: torch.dtype, variant: str, per_pair: bool, interleaved: bool
) -> None:
    ops = torch.ops.compilepass
    x = torch.randn(2, 5, 3, 40).to(dtype)
    weight = torch.randn(40).to(dtype)
    for turned in (40, 14):  # whole heads, and a part of them
        tables = torch.randn(2, 2, 5, 1, turned // 2 if per_pair else turned).to(dtype)
        for heads, (cos, sin) in (
            (x, tables),  # the heads of a token side by side, and as attention wants them
            (x.transpose(1, 2), tables.transpose(2, 3)),
        ):
            normed = ops.rms_norm(heads, weight, EPS, variant)
            wanted = ops.rotate(normed, cos, sin, interleaved, per_pair)
            found = ops.rms_norm_rotate(
                heads, weight, cos, sin, EPS, variant, interleaved, per_pair
            )
            assert torch.equal(found, wanted)


def test_layer_norm_keeps_the_digits_of_rows_far_from_zero() -> None:
    x = torch.randn(8, 4096) + 1e4
    exact = torch.nn.functional.layer_norm(x.double(), (4096,))
    out = torch.ops.compilepass.layer_norm(x, None, None, 1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)


def test_fatrelu_drops_what_is_at_its_threshold() -> None:
    gate = torch.tensor([0.25, 0.5, -1.0, 0.75])
    out = torch.ops.compilepass.fatrelu_and_mul(torch.cat((gate, torch.ones(4))), 0.5)
    assert out.tolist() == [0.0, 0.0, 0.0, 0.75]
