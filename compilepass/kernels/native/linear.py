"""Matrix multiplication of quantised operands."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["int8_linear"]


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
