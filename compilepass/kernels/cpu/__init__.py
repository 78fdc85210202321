"""CPU kernels: C++ on PyTorch's stable ABI, and oneDNN's int8 matmul that ships in PyTorch."""

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

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CPP_OPS = (
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_int8_quant",
    "gelu_and_mul",
    "quant_int8",
    "rms_norm",
    "rms_norm_dynamic_int8_quant",
    "silu_and_mul",
    "silu_and_mul_dynamic_int8_quant",
)


def register() -> None:
    """Register the CPU providers of the shipped ops; nothing is built or loaded yet."""
    for short in CPP_OPS:
        name = f"compilepass::{short}"
        provider(
            name,
            name="cpp",
            device_type="cpu",
            load=partial(_load_cpp, kernel_ops()[name], short),
            supports=_supports,
            falls_back=True,
        )


def _supports(*args: Any) -> str | None:
    """What ``takes`` in kernels.cpp decides for a call, but for gradients."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) > 1:
        return f"one dtype for all tensors is needed, not {sorted(map(str, dtypes))}"
    if not dtypes <= set(DTYPES):
        return f"{tensors[0].dtype} is not float32, bfloat16 or float16"
    if tensors[0].dim() == 0:
        return "a scalar has no rows"
    return None


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
