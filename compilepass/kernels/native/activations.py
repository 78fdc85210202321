"""Activations, and gated ones with int8 quantisation after them.

Those without gate are computed in fp32 and rounded once, as PyTorch's own are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantisation import quant_int8

__all__ = [
    "fatrelu_and_mul",
    "gelu_and_mul",
    "gelu_and_mul_dynamic_int8_quant",
    "gelu_fast",
    "gelu_mul",
    "gelu_mul_dynamic_int8_quant",
    "gelu_new",
    "mul_and_silu",
    "quick_gelu",
    "relu2",
    "silu_and_mul",
    "silu_and_mul_dynamic_int8_quant",
    "silu_mul",
    "silu_mul_dynamic_int8_quant",
    "swigluoai_and_mul",
]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's gate (arXiv:2002.05202): ``silu(gate) * up``, of one shape.

    The activated gate is rounded to its dtype.
    """
    return F.silu(gate) * up


def gelu_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """GeGLU's gate (arXiv:2002.05202): ``gelu(gate) * up``, of one shape.

    ``approximate`` is ``"none"`` (erf) or ``"tanh"``, as in :func:`torch.nn.functional.gelu`. The
    activated gate is rounded to its dtype.
    """
    return F.gelu(gate, approximate=approximate) * up


def silu_and_mul(x: Tensor) -> Tensor:
    """:func:`silu_mul` of the two halves of the last dim, gate first.

    ``x``: ``[..., 2 * I]``, result: ``[..., I]``.
    """
    half = x.shape[-1] // 2
    return silu_mul(x[..., :half], x[..., half:])


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """:func:`gelu_mul` of the two halves of the last dim, gate first.

    ``x``: ``[..., 2 * I]``, result: ``[..., I]``.
    """
    half = x.shape[-1] // 2
    return gelu_mul(x[..., :half], x[..., half:], approximate)


def silu_mul_dynamic_int8_quant(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """``quant_int8(silu_mul(gate, up))``: ``(q, scale)``; shapes as in those two."""
    return quant_int8(silu_mul(gate, up))


def silu_and_mul_dynamic_int8_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """``quant_int8(silu_and_mul(x))``: ``(q, scale)``; shapes as in those two."""
    return quant_int8(silu_and_mul(x))


def gelu_mul_dynamic_int8_quant(
    gate: Tensor, up: Tensor, approximate: str = "none"
) -> tuple[Tensor, Tensor]:
    """``quant_int8(gelu_mul(gate, up, approximate))``: ``(q, scale)``; shapes as in those two."""
    return quant_int8(gelu_mul(gate, up, approximate))


def gelu_and_mul_dynamic_int8_quant(x: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """``quant_int8(gelu_and_mul(x, approximate))``: ``(q, scale)``; shapes as in those two."""
    return quant_int8(gelu_and_mul(x, approximate))


def mul_and_silu(x: Tensor) -> Tensor:
    """The first half of the last dim times the silu of the second: :func:`silu_and_mul` with the
    value first and the gate second.

    ``x``: ``[..., 2 * I]``, result: ``[..., I]``.
    """
    half = x.shape[-1] // 2
    return silu_mul(x[..., half:], x[..., :half])


def fatrelu_and_mul(x: Tensor, threshold: float) -> Tensor:
    """FATReLU's gate (ProSparse, arXiv:2402.13516): the first half of the last dim times the
    second, where the first is above ``threshold``, and 0 elsewhere.

    ``x``: ``[..., 2 * I]``, result: ``[..., I]``.
    """
    half = x.shape[-1] // 2
    return F.threshold(x[..., :half], threshold, 0.0) * x[..., half:]


def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gpt-oss's gate (``GptOssExperts`` in Hugging Face): neighbours are a gate and its value.

    ``x``: ``[..., 2 * I]``, result: ``[..., I]``. The gate is clamped to at most ``limit``, the
    value to ``±limit``; the result is ``(value + 1) * gate * sigmoid(alpha * gate)``, computed in
    fp32.
    """
    gate = x[..., ::2].float().clamp(max=limit)
    value = x[..., 1::2].float().clamp(min=-limit, max=limit)
    return ((value + 1) * (gate * torch.sigmoid(alpha * gate))).to(x.dtype)


def gelu_new(x: Tensor) -> Tensor:
    """GELU's tanh approximation (arXiv:1606.08415), as GPT-2 writes it; computed in fp32."""
    x32 = x.float()
    inner = math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32.pow(3))
    return (0.5 * x32 * (1.0 + torch.tanh(inner))).to(x.dtype)


def gelu_fast(x: Tensor) -> Tensor:
    """GELU's tanh approximation, as Hugging Face's ``FastGELUActivation``; computed in fp32."""
    x32 = x.float()
    inner = x32 * 0.7978845608 * (1.0 + 0.044715 * x32 * x32)
    return (0.5 * x32 * (1.0 + torch.tanh(inner))).to(x.dtype)


def quick_gelu(x: Tensor) -> Tensor:
    """GELU's sigmoid approximation (arXiv:1606.08415), as in CLIP; computed in fp32."""
    x32 = x.float()
    return (x32 * torch.sigmoid(1.702 * x32)).to(x.dtype)


def relu2(x: Tensor) -> Tensor:
    """The square of relu (Primer, arXiv:2109.08668)."""
    return F.relu(x).square()
