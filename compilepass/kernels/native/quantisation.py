"""Quantisation of activations."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["quant_int8"]


def quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric dynamic int8 quantisation with one scale a row (token).

    ``x``: ``[..., H]``; result: ``q`` int8 ``[..., H]`` and ``scale`` fp32 ``[..., 1]`` with
    ``x ≈ q * scale``. True division, and rounding half to even.
    """
    x32 = x.float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    q = torch.round(x32 / scale).clamp(-128, 127).to(torch.int8)
    return q, scale
