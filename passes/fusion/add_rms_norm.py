"""Residual add and RMSNorm in one kernel.

Before::

    total = residual + x
    normed = weight * (total.float() * rsqrt(mean(total.float() ** 2, -1) + eps)).to(x.dtype)

After::

    normed, total = compilepass.fused_add_rms_norm(x, residual, weight, eps)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, PassContext, Rule
from compilepass.kernels import native

from .norm_variants import VARIANTS

__all__ = ["FuseAddRMSNorm"]


class FuseAddRMSNorm(FusionPass):
    """``residual + x`` and the RMSNorm of the sum; the sum may have any other user."""

    name = "fuse_add_rms_norm"
    covers = ("norm",)
    requires = ("eliminate_noops",)
    kernels = ("compilepass::fused_add_rms_norm",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        return [_rule(variant, dtypes) for variant, dtypes in VARIANTS.items()]


def _rule(variant: str, dtypes: tuple[torch.dtype, ...]) -> Rule:
    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return native.fused_add_rms_norm(x, residual, weight, eps, variant)

    def fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return torch.ops.compilepass.fused_add_rms_norm(x, residual, weight, eps, variant)  # type: ignore[no-any-return]

    inputs = {"x": ("...", "H"), "residual": ("...", "H"), "weight": ("H",)}
    return Rule(add_rms_norm, fused, inputs, name=f"add_rms_norm_{variant}", dtypes=dtypes)
