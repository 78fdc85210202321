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

from .norm_variants import VARIANTS

__all__ = ["FuseNormQuant"]


class FuseNormQuant(FusionPass):
    """The norm's result must have no other user than the quantisation; the sum may."""

    name = "fuse_norm_quant"
    covers = ("norm",)
    after = ("fuse_add_rms_norm",)
    requires = ("eliminate_common_subexpressions",)
    kernels = (
        "compilepass::fused_add_rms_norm_dynamic_int8_quant",
        "compilepass::rms_norm_dynamic_int8_quant",
    )

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        return [
            rule(variant, dtypes)
            for rule in (_add_norm_quant, _norm_quant)
            for variant, dtypes in VARIANTS.items()
        ]


def _add_norm_quant(variant: str, dtypes: tuple[torch.dtype, ...]) -> Rule:
    def add_rms_norm_quant(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return native.fused_add_rms_norm_dynamic_int8_quant(x, residual, weight, eps, variant)

    def fused(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        op = torch.ops.compilepass.fused_add_rms_norm_dynamic_int8_quant
        return op(x, residual, weight, eps, variant)  # type: ignore[no-any-return]

    inputs = {"x": ("...", "H"), "residual": ("...", "H"), "weight": ("H",)}
    name = f"add_rms_norm_quant_{variant}"
    return Rule(add_rms_norm_quant, fused, inputs, name=name, dtypes=dtypes)


def _norm_quant(variant: str, dtypes: tuple[torch.dtype, ...]) -> Rule:
    def rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return native.rms_norm_dynamic_int8_quant(x, weight, eps, variant)

    def fused(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        op = torch.ops.compilepass.rms_norm_dynamic_int8_quant
        return op(x, weight, eps, variant)  # type: ignore[no-any-return]

    inputs = {"x": ("...", "H"), "weight": ("H",)}
    return Rule(rms_norm_quant, fused, inputs, name=f"rms_norm_quant_{variant}", dtypes=dtypes)
