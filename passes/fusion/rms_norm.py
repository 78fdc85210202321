"""RMSNorm in one kernel.

Before::

    y = weight * (x.float() * rsqrt(mean(x.float() ** 2, -1) + eps)).to(x.dtype)

After::

    y = compilepass.rms_norm(x, weight, eps)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, PassContext, Rule
from compilepass.kernels import native

from .norm_variants import VARIANTS

__all__ = ["FuseRMSNorm"]

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


class FuseRMSNorm(FusionPass):
    """The norms that no larger fusion has taken: without residual, or without quantisation."""

    name = "fuse_rms_norm"
    covers = ("norm",)
    after = ("fuse_add_rms_norm", "fuse_norm_quant")
    requires = ("eliminate_noops",)
    kernels = ("compilepass::rms_norm",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        # a norm without weight is a part of one that has it
        return [*(_rule(variant, dtypes) for variant, dtypes in VARIANTS.items()), _weightless()]


def _rule(variant: str, dtypes: tuple[torch.dtype, ...]) -> Rule:
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return native.rms_norm(x, weight, eps, variant)

    def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.ops.compilepass.rms_norm(x, weight, eps, variant)  # type: ignore[no-any-return]

    inputs = {"x": ("...", "H"), "weight": ("H",)}
    return Rule(rms_norm, fused, inputs, name=f"rms_norm_{variant}", dtypes=dtypes)


def _weightless() -> Rule:
    def rms_norm(x: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def fused(x: Tensor, eps: float) -> Tensor:
        return torch.ops.compilepass.rms_norm(x, x.new_ones(x.shape[-1]), eps)  # type: ignore[no-any-return]

    return Rule(rms_norm, fused, {"x": ("...", "H")}, name="rms_norm_weightless", dtypes=FLOATING)
