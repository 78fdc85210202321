"""CPU kernels: C++ on PyTorch's stable ABI, built on first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import KernelError
from ...platforms import get_platform
from .. import native
from ..native.fused_quantisation import QUANTISATIONS, SOURCES, Quantisation, Source
from ..registry import KernelOp, kernel_ops, needs_grad, provider

__all__ = ["register"]

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
WIDEST_EXACT = 65536  # as in linear.cpp
FEWEST_ROWS = 2  # as in few_floats.h
MOST_DIMS = 9  # as in rotary.h


def register() -> None:
    """Register the CPU providers of the shipped ops; nothing is built or loaded yet."""
    for short, supports in CPP_OPS.items():
        name = f"compilepass::{short}"
        provider(
            name,
            name="cpp",
            device_type="cpu",
            load=partial(_load_cpp, kernel_ops()[name], short),
            supports=supports,
            falls_back=True,
        )


def _supports_rows(*args: Any) -> str | None:
    """What ``takes`` in op.h decides for a call, but for gradients."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) > 1:
        return f"one dtype for all tensors is needed, not {sorted(map(str, dtypes))}"
    if not dtypes <= DTYPES:
        return f"{tensors[0].dtype} is not float32, bfloat16 or float16"
    if tensors[0].dim() == 0:
        return "a scalar has no rows"
    return None


def _supports_rotation(x: Tensor, *args: Any) -> str | None:
    if any(isinstance(arg, Tensor) and arg.dim() > MOST_DIMS for arg in (x, *args)):
        return f"heads have {MOST_DIMS} dimensions at most"
    return _supports_rows(x, *args)


def _supports_rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> str | None:
    if not {cos.dtype, sin.dtype} <= DTYPES:
        return f"cos and sin must be float32, bfloat16 or float16, not {cos.dtype}"
    return _supports_rotation(q, k)


def _supports_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    variant: str = "llama",
) -> str | None:
    return _supports_rows(q, k, q_weight, k_weight) or _supports_rotary_embedding(
        q, k, cos, sin, interleaved
    )


def _supports_matmul(
    dtype: torch.dtype,
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> str | None:
    if xq.dtype != dtype:
        return f"xq must be {dtype}, not {xq.dtype}"
    if xscale.dtype != torch.float32:
        return f"xscale must be float32, not {xscale.dtype}"
    if out_dtype not in DTYPES:
        return f"{out_dtype} is not float32, bfloat16 or float16"
    return _supports_weights(xq, wq, wscale, dtype)


def _supports_dynamic_matmul(
    x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None, residual: Tensor | None = None
) -> str | None:
    return _supports_rows(x, residual) or _supports_weights(x, wq, wscale, torch.int8)


def _supports_weights(x: Tensor, wq: Tensor, wscale: Tensor, dtype: torch.dtype) -> str | None:
    if wq.dtype != dtype:
        return f"wq must be {dtype}, not {wq.dtype}"
    if wscale.dtype != torch.float32:
        return f"wscale must be float32, not {wscale.dtype}"
    if dtype == torch.int8 and x.shape[-1] > WIDEST_EXACT:
        return f"an int32 holds no dot product of more than {WIDEST_EXACT} int8 values"
    return None


def _supports_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> str | None:
    if not w.is_contiguous():
        return "the weight does not lie row by row in memory"
    if not _has_few_rows(x):
        if x.dtype != torch.float32:
            return f"x has more than {FEWEST_ROWS} rows and is not float32"
        if not _onednn_is_faster():
            return f"x has more than {FEWEST_ROWS} rows, which oneDNN is faster with on AMD's CPUs"
    return _supports_rows(x, w, bias)


def _has_few_rows(x: Tensor) -> bool:
    return all(isinstance(n, int) for n in x.shape) and x.numel() <= FEWEST_ROWS * x.shape[-1]


@functools.cache
def _onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 faster than MKL, which is made for another vendor's CPUs.

    Measured on AMD EPYC (Zen 4): 1.04 to 1.5 times from 3 rows to 512.
    """
    vendor = get_platform("cpu").capabilities().vendor
    return vendor == "AuthenticAMD" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _linear_of_many(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """What the C++ kernel of ``linear`` does not take."""
    dtypes = {t.dtype for t in (x, w, bias) if t is not None}
    plain = dtypes == {torch.float32} and x.numel() > 0 and w.numel() > 0
    if plain and not needs_grad(x, w, bias) and _onednn_is_faster():
        return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")  # type: ignore[no-any-return]
    return native.linear(x, w, bias)


def _supports_static(tensors: int, *args: Any) -> str | None:
    """A quantisation after so many ``tensors`` of one dtype, with a scale behind them."""
    for value, dtype in zip(args[tensors:], (torch.float32, torch.int32), strict=False):
        if isinstance(value, Tensor) and value.dtype != dtype:
            return f"a scale is float32 and a zero point int32, not {value.dtype}"
    return _supports_rows(*args[:tensors])


def _supports_fused(source: Source, quantisation: Quantisation) -> Callable[..., str | None]:
    if any(setting.startswith("Tensor") for setting in quantisation.settings):
        return partial(_supports_static, len(source.tensors))
    return _supports_rows


# What compilepass_register in kernels.cpp finds, and which calls each takes.
CPP_OPS: dict[str, Callable[..., str | None]] = {
    "asymmetric_quant_int8": _supports_rows,
    "fatrelu_and_mul": _supports_rows,
    "fp8_linear": partial(_supports_matmul, native.FP8),
    "fused_add_layer_norm": _supports_rows,
    "fused_add_rms_norm": _supports_rows,
    "gelu_and_mul": _supports_rows,
    "gelu_fast": _supports_rows,
    "gelu_mul": _supports_rows,
    "gelu_new": _supports_rows,
    "group_quant_fp8": _supports_rows,
    "int8_dynamic_linear": _supports_dynamic_matmul,
    "int8_linear": partial(_supports_matmul, torch.int8),
    "layer_norm": _supports_rows,
    "linear": _supports_linear,
    "mul_and_silu": _supports_rows,
    "qk_norm_rope": _supports_qk_norm_rope,
    "quant_fp8": _supports_rows,
    "quant_int8": _supports_rows,
    "quick_gelu": _supports_rows,
    "relu2": _supports_rows,
    "rms_norm": _supports_rows,
    "rms_norm_rotate": _supports_rotation,
    "rms_norm_rotate_qk": _supports_rotation,
    "rotary_embedding": _supports_rotary_embedding,
    "rotate": _supports_rotation,
    "rotate_qk": _supports_rotation,
    "silu_and_mul": _supports_rows,
    "silu_mul": _supports_rows,
    "static_quant_fp8": partial(_supports_static, 1),
    "static_quant_int8": partial(_supports_static, 1),
    "swigluoai_and_mul": _supports_rows,
    "weight_only_int8_linear": _supports_dynamic_matmul,
    **{
        f"{source}_{name}_quant": _supports_fused(SOURCES[source], quantisation)
        for source in SOURCES
        for name, quantisation in QUANTISATIONS.items()
    },
}


def _load_cpp(op: KernelOp, short: str) -> None:
    from .build import library

    built = library()
    _define_fallback(op, short)
    if built.compilepass_register(short.encode()):
        raise KernelError(f"the built library could not register {op.name}")


@functools.cache
def _fallbacks() -> Any:
    new_library: Callable[..., Any] = torch.library.Library
    return new_library("compilepass_native", "FRAGMENT")


def _define_fallback(op: KernelOp, short: str) -> None:
    """The op that the C++ kernel calls for what it does not take; autograd sees through it."""
    _fallbacks().define(op.schema.partition("::")[2])
    fallback = _linear_of_many if short == "linear" else op.run_native
    _fallbacks().impl(short, fallback, "CompositeExplicitAutograd")
    _fallbacks().impl(short, torch.library.fallthrough_kernel, "Autograd")
