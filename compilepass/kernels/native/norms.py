"""Normalisation over the last dim, with the residual addition before it and int8 after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantisation import quant_int8

__all__ = [
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_int8_quant",
    "layer_norm",
    "rms_norm",
    "rms_norm_dynamic_int8_quant",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float, variant: str = "llama") -> Tensor:
    """Root-mean-square norm (arXiv:1910.07467) over the last dim, computed in fp32.

    ``x``: ``[..., H]``, ``weight``: ``[H]``. Models differ in where they round to ``x.dtype`` and
    in what they multiply by, which ``variant`` names after the best known of each:

    * ``"llama"``: ``weight * round(normed)``, as in Hugging Face's Llama;
    * ``"torch"``: ``round(normed * weight)``, as :func:`torch.nn.functional.rms_norm` computes;
    * ``"gemma"``: ``round(normed * (1 + weight))``, a weight around zero.
    """
    x32 = x.float()
    variance = x32.pow(2).mean(-1, keepdim=True)
    normed = x32 * torch.rsqrt(variance + eps)
    if variant == "llama":
        return weight * normed.to(x.dtype)
    factor = 1.0 + weight.float() if variant == "gemma" else weight.float()
    return (normed * factor).to(x.dtype)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(sum), sum)`` with ``sum = x + residual`` rounded to their dtype.

    ``x`` and ``residual``: ``[..., H]``, ``weight``: ``[H]``; ``variant`` as in :func:`rms_norm`.
    """
    total = x + residual
    return rms_norm(total, weight, eps, variant), total


def rms_norm_dynamic_int8_quant(
    x: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    """``quant_int8(rms_norm(x, weight, eps))``: ``(q, scale)``; arguments as in those two."""
    return quant_int8(rms_norm(x, weight, eps, variant))


def fused_add_rms_norm_dynamic_int8_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor, Tensor]:
    """``(q, scale, sum)``: :func:`fused_add_rms_norm` with its normed output quantised."""
    normed, total = fused_add_rms_norm(x, residual, weight, eps, variant)
    q, scale = quant_int8(normed)
    return q, scale, total


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm (arXiv:1607.06450) over the last dim, as :func:`torch.nn.functional.layer_norm`.

    ``x``: ``[..., H]``, ``weight`` and ``bias``: ``[H]`` or ``None``. Computed in fp32 and rounded
    once.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """``(layer_norm(sum), sum)`` with ``sum = x + residual`` rounded to their dtype."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total
