"""Quantisation of activations to int8 and to fp8 (``float8_e4m3fn``).

The numbers are computed in fp32, with true division, and rounded half to even. A scale is fp32, and
one that is taken from the values is that of a range of 1e-5 at least, so that zeros stay zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "FP8",
    "FP8_MAX",
    "asymmetric_quant_int8",
    "group_quant_fp8",
    "quant_fp8",
    "quant_int8",
    "static_quant_fp8",
    "static_quant_int8",
]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # what is above is cut off, since the type has no infinity
SMALLEST_RANGE = 1e-5


def quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric dynamic int8 quantisation with one scale a row (token).

    ``x``: ``[..., H]``; result: ``q`` int8 ``[..., H]`` and ``scale`` fp32 ``[..., 1]`` with
    ``x ≈ q * scale``. True division, and rounding half to even.
    """
    x32 = x.float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_RANGE) / 127
    q = torch.round(x32 / scale).clamp(-128, 127).to(torch.int8)
    return q, scale


def asymmetric_quant_int8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Dynamic int8 quantisation of the range from a row's least to its largest value, and zero.

    ``x``: ``[..., H]``; result: ``q`` int8 ``[..., H]``, ``scale`` fp32 ``[..., 1]`` and
    ``zero_point`` int32 ``[..., 1]`` with ``x ≈ (q - zero_point) * scale``. Zero is exact.
    """
    x32 = x.float()
    least, largest = x32.amin(-1, keepdim=True).clamp(max=0), x32.amax(-1, keepdim=True)
    scale = (largest.clamp(min=0) - least).clamp(min=SMALLEST_RANGE) / 255
    shift = -128 - torch.round(least / scale)
    q = (torch.round(x32 / scale) + shift).clamp(-128, 127).to(torch.int8)
    return q, scale, shift.to(torch.int32)


def static_quant_int8(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """int8 quantisation with a scale, and a zero point, that are known.

    ``x``: ``[..., H]``, ``scale``: fp32 of one element, ``zero_point``: int32 of one element, or
    ``None`` for 0; result: int8 ``[..., H]`` with ``x ≈ (result - zero_point) * scale``.
    """
    steps = torch.round(x.float() / scale.reshape(()))
    if zero_point is not None:
        steps = steps + zero_point.reshape(())
    return steps.clamp(-128, 127).to(torch.int8)


def quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic fp8 quantisation with one scale a row (token).

    ``x``: ``[..., H]``; result: ``q`` fp8 ``[..., H]`` and ``scale`` fp32 ``[..., 1]`` with
    ``x ≈ q * scale``, the row's largest magnitude being 448.
    """
    x32 = x.float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_RANGE) / FP8_MAX
    return _fp8(x32 / scale), scale


def group_quant_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """:func:`quant_fp8` with one scale for each ``group`` of neighbours, 64 or 128 as a rule.

    ``x``: ``[..., H]`` with ``H`` a multiple of ``group``; ``scale``: ``[..., H / group]``.
    """
    q, scale = quant_fp8(x.reshape(*x.shape[:-1], x.shape[-1] // group, group))
    return q.flatten(-2), scale.squeeze(-1)


def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """fp8 quantisation with a scale that is known.

    ``x``: ``[..., H]``, ``scale``: fp32 of one element; result: fp8 ``[..., H]``.
    """
    return _fp8(x.float() / scale.reshape(()))


def _fp8(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
