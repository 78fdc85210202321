"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from .norms import rms_norm

__all__ = [
    "qk_norm_rope",
    "rms_norm_rotate",
    "rms_norm_rotate_qk",
    "rotary_embedding",
    "rotate",
    "rotate_qk",
]


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


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool = False,
    variant: str = "llama",
) -> tuple[Tensor, Tensor]:
    """:func:`rotary_embedding` of ``q`` and ``k``, each head of which is normed before.

    ``q_weight`` and ``k_weight``: ``[D]``, of :func:`~compilepass.kernels.native.rms_norm` with
    ``eps`` and ``variant``; the other arguments as in :func:`rotary_embedding`.
    """
    q, k = rms_norm(q, q_weight, eps, variant), rms_norm(k, k_weight, eps, variant)
    return rotary_embedding(q, k, cos, sin, interleaved)


def rms_norm_rotate(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    variant: str = "llama",
    interleaved: bool = False,
    per_pair: bool = False,
) -> Tensor:
    """:func:`rotate` of heads that are normed before, one tensor of them at a time.

    ``weight``: ``[D]``, of :func:`~compilepass.kernels.native.rms_norm` with ``eps`` and
    ``variant``; ``x`` and the tables as in :func:`rotate`.
    """
    return rotate(rms_norm(x, weight, eps, variant), cos, sin, interleaved, per_pair)


def rms_norm_rotate_qk(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    variant: str = "llama",
    interleaved: bool = False,
    per_pair: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm_rotate` of ``q`` and of ``k``, which have the same tables."""
    return (
        rms_norm_rotate(q, q_weight, cos, sin, eps, variant, interleaved, per_pair),
        rms_norm_rotate(k, k_weight, cos, sin, eps, variant, interleaved, per_pair),
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


def rotate_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    per_pair: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`rotate` of ``q`` and of ``k``, which have the same tables."""
    return (
        rotate(q, cos, sin, interleaved, per_pair, wide),
        rotate(k, cos, sin, interleaved, per_pair, wide),
    )


def _paired(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)
