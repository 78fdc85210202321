"""Liger's Triton kernels (package ``liger-kernel``), under the signatures of ours.

The functions below its autograd are called: what needs a gradient runs native.
"""

from __future__ import annotations

from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
from liger_kernel.ops.geglu import geglu_forward
from liger_kernel.ops.rms_norm import rms_norm_forward
from liger_kernel.ops.swiglu import swiglu_forward
from torch import Tensor

__all__ = ["fused_add_rms_norm", "gelu_mul", "rms_norm", "silu_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, variant: str = "llama") -> Tensor:
    offset, casting = _rounding(variant)
    out: Tensor = rms_norm_forward(
        x.contiguous(), weight.contiguous(), eps, offset, casting, row_mode=None
    )[0]
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    offset, casting = _rounding(variant)
    out, total, *_ = fused_add_rms_norm_forward(
        x.contiguous(), residual.contiguous(), weight.contiguous(), eps, offset, casting
    )
    return out, total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = swiglu_forward(gate.contiguous(), up.contiguous())[-1]
    return out


def gelu_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    out: Tensor = geglu_forward(gate.contiguous(), up.contiguous())[-1]
    return out


def _rounding(variant: str) -> tuple[float, str]:
    """The offset of the weight, and Liger's name for rounding early ("llama") or at the end."""
    if variant == "llama":
        return 0.0, "llama"
    return (1.0 if variant == "gemma" else 0.0), "gemma"
