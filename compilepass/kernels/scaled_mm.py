"""PyTorch's own fp8 multiplication, ``torch._scaled_mm``, as a provider of ``fp8_linear``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import native
from .registry import provider

__all__ = ["fp8_linear", "register"]

FIRST_WITH_FP8 = (8, 9)  # compute capability, of NVIDIA's Ada


def register() -> None:
    """Register it for CUDA and ROCm devices; on the CPU the C++ kernel is the faster one."""
    provider(
        "compilepass::fp8_linear",
        name="scaled_mm",
        device_type="cuda",
        load=_load,
        supports=supports,
        available=_missing,
    )


def _load() -> Callable[..., Tensor]:
    return fp8_linear


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no CUDA or ROCm device"
    if torch.version.hip is None and torch.cuda.get_device_capability() < FIRST_WITH_FP8:
        return "the device multiplies no fp8 (compute capability 8.9 is needed)"
    return None


def supports(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> str | None:
    """What ``torch._scaled_mm`` takes with a scale for each row and column."""
    if {xq.dtype, wq.dtype} != {native.FP8}:
        return f"xq and wq must be {native.FP8}, not {xq.dtype} and {wq.dtype}"
    if {xscale.dtype, wscale.dtype} != {torch.float32}:
        return f"scales must be float32, not {xscale.dtype} and {wscale.dtype}"
    if out_dtype != torch.bfloat16 or (bias is not None and bias.dtype != out_dtype):
        return "with a scale a row, the result and the bias are bfloat16"
    if wq.shape[0] % 16 or wq.shape[1] % 16:
        return f"the sizes of wq are multiples of 16, not {tuple(wq.shape)}"
    return "there is no row" if xq.numel() == 0 else None


def fp8_linear(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """:func:`compilepass.kernels.native.fp8_linear`, for what :func:`supports` takes."""
    leading = xq.shape[:-1]
    rows = xq.reshape(-1, xq.shape[-1]).contiguous()
    scales = xscale.expand(*leading, 1).reshape(-1, 1).contiguous()
    out = torch._scaled_mm(
        rows,
        wq.contiguous().t(),
        scales,
        wscale.reshape(1, -1).contiguous(),
        bias=bias,
        out_dtype=out_dtype,
    )
    return out.view(*leading, wq.shape[0])
