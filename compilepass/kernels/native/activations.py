"""Gated activations, with int8 quantisation after them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .quantisation import quant_int8

__all__ = [
    "gelu_and_mul",
    "gelu_mul",
    "silu_and_mul",
    "silu_and_mul_dynamic_int8_quant",
    "silu_mul",
    "silu_mul_dynamic_int8_quant",
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
