"""RMSNorm, with or without a residual add before it, and the int8 quantisation of its result.

Before::

    normed = rms_norm(x, weight, eps)
    scale = normed.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    q = round(normed / scale).clamp(-128, 127).to(int8)

After::

    q, scale = compilepass.rms_norm_dynamic_int8_quant(x, weight, eps)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, PassContext, Rule
from compilepass.kernels import native

__all__ = ["FuseNormQuant"]


def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    normed, total = native.fused_add_rms_norm(x, residual, weight, eps)
    return (*native.quant_int8(normed), total)


def fused_add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    ops = torch.ops.compilepass
    return ops.fused_add_rms_norm_dynamic_int8_quant(x, residual, weight, eps)  # type: ignore[no-any-return]


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return native.quant_int8(native.rms_norm(x, weight, eps))


def fused_rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.ops.compilepass.rms_norm_dynamic_int8_quant(x, weight, eps)  # type: ignore[no-any-return]


class FuseNormQuant(FusionPass):
    """The norm's result must have no other user than the quantisation; the sum may."""

    name = "fuse_norm_quant"
    after = ("fuse_add_rms_norm",)
    requires = ("eliminate_common_subexpressions",)
    kernels = (
        "compilepass::fused_add_rms_norm_dynamic_int8_quant",
        "compilepass::rms_norm_dynamic_int8_quant",
    )

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        norm = {"x": ("...", "H"), "weight": ("H",)}
        return [
            Rule(add_rms_norm_quant, fused_add_rms_norm_quant, {**norm, "residual": ("...", "H")}),
            Rule(rms_norm_quant, fused_rms_norm_quant, norm),
        ]
