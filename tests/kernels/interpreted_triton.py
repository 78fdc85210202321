"""The Triton kernels on CPU tensors, in Triton's interpreter; ``test_triton`` runs this file.

``TRITON_INTERPRET=1`` must be in the environment before Triton is imported.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from compilepass import kernels
from compilepass.kernels.triton import TRITON_OPS, register

from .cases import (
    CASES,
    DTYPES,
    EPS,
    FP64_ATOL,
    FP64_RTOL,
    GELU_ATOL,
    NORMED_AND_ROTATED,
    as_numbers,
    mapped,
    op_of,
    outputs,
    strided,
    to_double,
)
from .test_numerics import (
    INF,
    NAN,
    NOT_FOR_EXTREMES,
    SUBTRACTS,
    assert_extremes_like_native,
    assert_like_native,
    check_registration,
    every_dtype,
    native_of,
    scale_of,
    slack_of,
)

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

TRITON_CASES = {n: case for n, case in CASES.items() if n.partition("/")[0] in TRITON_OPS}
# a row wider than a block, for those that hold a row
SHAPES = ((0, 16), (1, 7), (5, 63), (3, 1), (300,), (2, 3, 256))
every_case = pytest.mark.parametrize("name", TRITON_CASES)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(scope="session", autouse=True)
def _on_the_cpu() -> None:
    """From here on, the ops run their Triton kernels."""
    register("cpu", priority=10)
    _round_to_bfloat16_as_a_gpu_does()
    for short in TRITON_OPS:
        op = kernels.find(f"compilepass::{short}")
        assert op is not None
        assert op.available("cpu").provider == "triton"


def _round_to_bfloat16_as_a_gpu_does() -> None:
    """The interpreter (3.6 to 3.9) truncates fp32 to bfloat16, where hardware rounds to even."""
    truncating = InterpreterBuilder.cast_impl

    def cast(self: Any, value: Any, dtype: Any) -> Any:
        if (value.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return truncating(self, value, dtype)
        shape = np.shape(value.data)
        dense = torch.from_numpy(np.array(value.data, dtype=np.float32).reshape(-1))
        bits = dense.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(shape)
        return TensorHandle(bits, tl.bfloat16)

    InterpreterBuilder.cast_impl = cast


@every_shape
@every_dtype
@every_case
def test_a_kernel_is_near_fp64_and_rounds_as_native_does(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    case = TRITON_CASES[name]
    args = case.inputs(shape, dtype)
    out, native = outputs(op_of(name)(*args)), outputs(native_of(name)(*args))
    atol = slack_of(name, shape)
    assert_like_native(
        out,
        native,
        atol=atol,
        subtracts=name.startswith(NORMED_AND_ROTATED),
        scale=scale_of(name, args),
        dtype=dtype,
    )
    for mine in out:
        assert mine.is_contiguous()
    wanted = case.oracle(*mapped(args, to_double))
    subtracts = name.startswith(SUBTRACTS) and args[0].numel()
    step = torch.zeros(())
    if case.numbers is not None:
        numbers = case.numbers(args, out)
        out, step = (numbers.values, *numbers.rest), numbers.within
    for i, (mine, exact) in enumerate(zip(out, wanted, strict=True)):
        slack = step if i == 0 else torch.zeros(())
        size = FP64_RTOL[dtype] * (exact.abs() + (exact.abs().amax() if subtracts else 0))
        allowed = max(FP64_ATOL[dtype], atol) + size + slack
        assert bool(((mine.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("name", [n for n in TRITON_CASES if "quant" in n or "norm" in n])
def test_a_row_wider_than_a_block_is_walked_through(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compilepass.kernels.triton import rows

    monkeypatch.setattr(rows, "WIDEST_BLOCK", 64)
    for dtype in DTYPES:
        args = TRITON_CASES[name].inputs((2, 200), dtype)
        assert_like_native(
            outputs(op_of(name)(*args)),
            outputs(native_of(name)(*args)),
            atol=slack_of(name, (2, 200)),
            subtracts=name.startswith(NORMED_AND_ROTATED),
            scale=scale_of(name, args),
            dtype=dtype,
        )


@every_dtype
@every_case
def test_a_kernel_takes_inputs_of_any_stride(name: str, dtype: torch.dtype) -> None:
    args = TRITON_CASES[name].inputs((2, 3, 24), dtype)
    dense = outputs(op_of(name)(*args))
    for change in (strided, _with_leading_dims_turned, _in_a_wider_one):
        out = outputs(op_of(name)(*mapped(args, change)))
        for mine, theirs in zip(out, dense, strict=True):
            assert torch.equal(as_numbers(mine), as_numbers(theirs))
            assert mine.is_contiguous()


def _with_leading_dims_turned(t: Tensor) -> Tensor:
    return t if t.dim() < 3 else t.transpose(0, 1).contiguous().transpose(0, 1)


def _in_a_wider_one(t: Tensor) -> Tensor:
    return torch.cat((t, t), -1)[..., : t.shape[-1]]


@every_case
def test_opcheck(name: str) -> None:
    check_registration(name)


@pytest.mark.parametrize("fill", [1e-30, 1e4, 3e38, INF, -INF, NAN])
@pytest.mark.parametrize("name", [n for n in TRITON_CASES if not n.startswith(NOT_FOR_EXTREMES)])
def test_extreme_values_give_what_native_gives(name: str, fill: float) -> None:
    args = TRITON_CASES[name].inputs((4, 33), torch.float32)
    args[0][1, ..., 3] = fill
    args[0][2] = fill
    assert_extremes_like_native(name, args)


@every_dtype
@pytest.mark.parametrize("name", [n for n in TRITON_CASES if n.startswith("rota")])
def test_rotation_equals_native_exactly(name: str, dtype: torch.dtype) -> None:
    for width in (4, 17, 64):
        args = TRITON_CASES[name].inputs((2, 3, width), dtype)
        for mine, theirs in zip(
            outputs(op_of(name)(*args)), outputs(native_of(name)(*args)), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_tables_of_rotation_broadcast_along_any_leading_dim() -> None:
    rotate = torch.ops.compilepass.rotate
    for leading in ((), (1,), (5,), (3, 1), (1, 5), (2, 1, 5), (2, 3, 5), (2, 1, 1)):
        x = torch.randn(2, 3, 5, 16)
        cos, sin = torch.randn(2, *leading, 16)
        assert torch.equal(rotate(x, cos, sin), kernels.native.rotate(x, cos, sin))


def test_more_leading_dims_than_the_kernel_counts_along_are_merged_or_copied() -> None:
    x = torch.randn(2, 3, 2, 3, 2, 8).permute(4, 0, 3, 1, 2, 5)
    cos, sin = torch.randn(2, 3, 1, 2, 8)
    out = torch.ops.compilepass.rotate(x, cos, sin)
    assert torch.equal(out, kernels.native.rotate(x, cos, sin))


@pytest.mark.parametrize("widest", [64, 1024])
def test_layer_norm_keeps_the_digits_of_rows_far_from_zero(
    widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compilepass.kernels.triton import rows

    monkeypatch.setattr(rows, "WIDEST_BLOCK", widest)
    x = torch.randn(4, 1000) + 1e4
    exact = torch.nn.functional.layer_norm(x.double(), (1000,))
    out = torch.ops.compilepass.layer_norm(x, None, None, 1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)


def test_saturation_and_ties_round_as_native_does() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0]])
    for mine, theirs in zip(
        torch.ops.compilepass.quant_int8(x), kernels.native.quant_int8(x), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_a_kernel_declines_what_it_cannot_do_and_native_does_it() -> None:
    op = kernels.find("compilepass::rms_norm")
    assert op is not None
    x, weight = torch.randn(2, 8).bfloat16(), torch.randn(8)
    declined = "triton: one dtype for all tensors is needed"
    assert declined in str(op.providers[0].supports and op.supports("cpu", x, weight, EPS))
    out = torch.ops.compilepass.rms_norm(x, weight, EPS)
    assert torch.equal(out, kernels.native.rms_norm(x, weight, EPS))


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match="as wide as its input"):
        torch.ops.compilepass.rms_norm(torch.ones(2, 8), torch.ones(7), EPS)


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our provider over Liger's kernels, with what they use and the interpreter does not have."""
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    pytest.importorskip("liger_kernel", reason="needs liger-kernel")
    convert = interpreter._implicit_cvt

    def converted(arg: Any) -> Any:
        if isinstance(arg, float):  # a compiled kernel gets a value of Triton's
            return tl.tensor(
                TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32
            )
        return convert(arg)

    monkeypatch.setattr(interpreter, "_implicit_cvt", converted)
    monkeypatch.setattr(libdevice, "rsqrt", _rsqrt)
    monkeypatch.setattr(libdevice, "tanh", _tanh)
    from compilepass.kernels.providers import liger

    return liger


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]
    return tl.rsqrt(x)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        *(n for n in CASES if re.fullmatch(r"(fused_add_)?rms_norm(/.*)?", n)),
        "silu_mul",
        "gelu_mul/tanh",
    ],
)
def test_ligers_kernels_under_our_signatures_compute_what_native_does(
    name: str, dtype: torch.dtype, liger: Any
) -> None:
    op = kernels.find(op_of(name))
    assert op is not None
    (provider,) = (p for p in op.providers if p.name == "liger")
    for shape in ((0, 16), (7, 63), (2, 3, 300)):
        args = CASES[name].inputs(shape, dtype)
        assert provider.supports is not None
        assert provider.supports(*args) is None
        ours = outputs(getattr(liger, name.partition("/")[0])(*mapped(args, strided)))
        assert_like_native(ours, outputs(op.run_native(*args)), atol=GELU_ATOL)
        for out in ours:
            assert out.is_contiguous()
