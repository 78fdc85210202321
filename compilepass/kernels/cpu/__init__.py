"""CPU kernels: C++ on PyTorch's stable ABI, built on first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import KernelError
from ..registry import KernelOp, kernel_ops, provider

__all__ = ["register"]

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
WIDEST_EXACT = 65536  # as in linear.cpp


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


def _supports_rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> str | None:
    if not {cos.dtype, sin.dtype} <= DTYPES:
        return f"cos and sin must be float32, bfloat16 or float16, not {cos.dtype}"
    return _supports_rows(q, k)


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


def _supports_int8_linear(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> str | None:
    if {xq.dtype, wq.dtype} != {torch.int8}:
        return f"xq and wq must be int8, not {xq.dtype} and {wq.dtype}"
    if {xscale.dtype, wscale.dtype} != {torch.float32}:
        return f"scales must be float32, not {xscale.dtype} and {wscale.dtype}"
    if out_dtype not in DTYPES:
        return f"{out_dtype} is not float32, bfloat16 or float16"
    if xq.shape[-1] > WIDEST_EXACT:
        return f"an int32 holds no dot product of more than {WIDEST_EXACT} int8 values"
    return None


# What compilepass_register in kernels.cpp finds, and which calls each takes.
CPP_OPS: dict[str, Callable[..., str | None]] = {
    "fatrelu_and_mul": _supports_rows,
    "fused_add_layer_norm": _supports_rows,
    "fused_add_rms_norm": _supports_rows,
    "fused_add_rms_norm_dynamic_int8_quant": _supports_rows,
    "gelu_and_mul": _supports_rows,
    "gelu_and_mul_dynamic_int8_quant": _supports_rows,
    "gelu_fast": _supports_rows,
    "gelu_mul": _supports_rows,
    "gelu_mul_dynamic_int8_quant": _supports_rows,
    "gelu_new": _supports_rows,
    "int8_linear": _supports_int8_linear,
    "layer_norm": _supports_rows,
    "mul_and_silu": _supports_rows,
    "qk_norm_rope": _supports_qk_norm_rope,
    "quant_int8": _supports_rows,
    "quick_gelu": _supports_rows,
    "relu2": _supports_rows,
    "rms_norm": _supports_rows,
    "rms_norm_dynamic_int8_quant": _supports_rows,
    "rms_norm_rotate": _supports_rows,
    "rotary_embedding": _supports_rotary_embedding,
    "rotate": _supports_rows,
    "silu_and_mul": _supports_rows,
    "silu_and_mul_dynamic_int8_quant": _supports_rows,
    "silu_mul": _supports_rows,
    "silu_mul_dynamic_int8_quant": _supports_rows,
    "swigluoai_and_mul": _supports_rows,
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
    _fallbacks().impl(short, op.run_native, "CompositeExplicitAutograd")
    _fallbacks().impl(short, torch.library.fallthrough_kernel, "Autograd")
