"""Matrix multiplication: of quantised operands, and of few rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantisation import quant_int8

__all__ = [
    "fp8_linear",
    "int8_dynamic_linear",
    "int8_linear",
    "linear",
    "weight_only_int8_linear",
]


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ w.T + bias`` in one dtype: ``x``: ``[..., K]``, ``w``: ``[N, K]``, ``bias``: ``[N]``.

    What there are kernels for are few rows, of one token or some, where the time is that of
    reading ``w``; they add up in fp32 and round once.
    """
    return F.linear(x, w, bias)


def int8_linear(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``dequantise(xq) @ dequantise(wq).T + bias``, accumulated and scaled in fp32.

    ``xq``: int8 ``[..., K]``, ``xscale``: fp32 ``[..., 1]`` (a scale a token), ``wq``: int8
    ``[N, K]``, ``wscale``: fp32 ``[N]`` (a scale a channel), ``bias``: ``[N]`` or ``None``; result:
    ``out_dtype`` ``[..., N]``.
    """
    out = (xq.float() @ wq.float().t()) * xscale * wscale
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def int8_dynamic_linear(
    x: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`int8_linear` of ``x`` after ``quant_int8``, then ``residual`` plus that.

    ``x``: ``[..., K]``, ``residual``: ``[..., N]`` or ``None``, the others as there; result:
    ``[..., N]`` of the dtype of ``x``, to which it is rounded before and after the addition.
    """
    q, scale = quant_int8(x)
    out = int8_linear(q, scale, wq, wscale, bias, x.dtype)
    return out if residual is None else residual + out


def weight_only_int8_linear(x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ dequantise(wq).T + bias``, accumulated and scaled in fp32, rounded once.

    ``x``: ``[..., K]`` in floating point, the others as in :func:`int8_linear`; result:
    ``[..., N]`` of the dtype of ``x``.
    """
    out = (x.float() @ wq.float().t()) * wscale
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def fp8_linear(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """:func:`int8_linear` with ``xq`` and ``wq`` in fp8, and ``xscale`` maybe of one element."""
    return int8_linear(xq, xscale, wq, wscale, bias, out_dtype)
