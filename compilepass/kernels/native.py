"""The mathematics of every shipped kernel, as pure functions of plain torch ops.

These functions are the reference that the platform kernels are tested against, the native forward
of the layers, and the source that rewrite patterns are traced from. So they keep three invariants:
no state, no branch on a tensor's size, and any leading rank.

A kernel's rounding contract is read off here: where a ``.to(dtype)`` stands, the value is rounded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_int8_quant",
    "gelu_and_mul",
    "gelu_mul",
    "int8_linear",
    "quant_int8",
    "rms_norm",
    "rms_norm_dynamic_int8_quant",
    "rotary_embedding",
    "rotate",
    "silu_and_mul",
    "silu_and_mul_dynamic_int8_quant",
    "silu_mul",
    "silu_mul_dynamic_int8_quant",
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


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate ``q`` and ``k`` by their position (RoPE, arXiv:2104.09864).

    ``q``, ``k``: ``[..., heads, D]``; ``cos``, ``sin``: ``[..., R / 2]`` with ``R <= D``. The first
    ``R`` elements of each head are rotated, the rest passes through (partial rotary).
    ``interleaved`` pairs neighbours (GPT-J) instead of the two halves (NeoX, Llama).
    Computed in the dtype of ``q`` and ``k``, with ``cos`` and ``sin`` cast to it, as Hugging Face
    and vLLM do.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return (
        rotate(q, cos.to(q.dtype), sin.to(q.dtype), interleaved, per_pair=True),
        rotate(k, cos.to(k.dtype), sin.to(k.dtype), interleaved, per_pair=True),
    )


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    per_pair: bool = False,
    wide: bool = False,
) -> Tensor:
    """Rotate the first ``R`` elements of each head, with tables that broadcast over the heads.

    ``x``: ``[..., D]``; ``cos``, ``sin``: ``[..., R]``, whose leading dimensions broadcast against
    those of ``x`` and are no more of them. With ``per_pair`` they are ``[..., R / 2]``, a value a
    pair; without, the two elements of a pair have values of their own. ``interleaved`` pairs
    neighbours instead of the two halves. Every product and sum is rounded to the dtype of ``x``;
    with ``wide`` only the result is, as in Hugging Face's Cohere.
    """
    width = cos.shape[-1] * (2 if per_pair else 1)
    if width < x.shape[-1]:
        turned = rotate(x[..., :width], cos, sin, interleaved, per_pair, wide)
        return torch.cat((turned, x[..., width:]), -1)
    if wide:
        turned = rotate(x.float(), cos.float(), sin.float(), interleaved, per_pair)
        return turned.to(x.dtype)
    half = width // 2
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    if not per_pair:
        return x * cos + _paired(-second, first, interleaved) * sin
    return _paired(first * cos - second * sin, second * cos + first * sin, interleaved)


def _paired(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


def quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric dynamic int8 quantisation with one scale a row (token).

    ``x``: ``[..., H]``; result: ``q`` int8 ``[..., H]`` and ``scale`` fp32 ``[..., 1]`` with
    ``x ≈ q * scale``. True division, and rounding half to even.
    """
    x32 = x.float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    q = torch.round(x32 / scale).clamp(-128, 127).to(torch.int8)
    return q, scale


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


def silu_mul_dynamic_int8_quant(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """``quant_int8(silu_mul(gate, up))``: ``(q, scale)``; shapes as in those two."""
    return quant_int8(silu_mul(gate, up))


def silu_and_mul_dynamic_int8_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """``quant_int8(silu_and_mul(x))``: ``(q, scale)``; shapes as in those two."""
    return quant_int8(silu_and_mul(x))
