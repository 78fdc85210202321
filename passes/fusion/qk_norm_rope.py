"""Heads that are normed, each by itself, and then rotated, in one kernel.

Before::

    q = (weight * rms(x)).transpose(1, 2)               # or transposed before the norm
    y = q * cos + cat((-q[..., half:], q[..., :half]), -1) * sin

After::

    y = compilepass.rms_norm_rotate(x, weight, cos, sin, eps, variant)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, PassContext, Rule
from compilepass.kernels import native
from compilepass.rewrite import Input

from .norm_variants import VARIANTS

__all__ = ["FuseQKNormRope"]

#: of the norms of models that rotate only a part of a head (GLM 4.5; Qwen3-Next)
PARTIAL = ("gemma", "llama")


class FuseQKNormRope(FusionPass):
    """Queries and keys of Qwen3, Gemma 3, Exaone 4 and the like, one by one: by two halves, with
    tables as wide as what is rotated. The norm's result must have no other user than the rotation.
    """

    name = "fuse_qk_norm_rope"
    covers = ("norm", "rotary")
    after = ("fuse_layer_norm",)
    before = ("fuse_add_rms_norm", "fuse_norm_quant", "fuse_rms_norm", "fuse_rope")
    requires = ("eliminate_common_subexpressions",)
    kernels = ("compilepass::rms_norm_rotate",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        # around a rotation there may be a cat with the rest of a head, so that comes first
        partial = [_partial(v, dtypes) for v, dtypes in VARIANTS.items() if v in PARTIAL]
        return [*partial, *(_whole(v, dtypes) for v, dtypes in VARIANTS.items())]


def _whole(variant: str, dtypes: tuple[torch.dtype, ...]) -> Rule:
    def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        return native.rms_norm_rotate(x, weight, cos, sin, eps, variant)

    def fused(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        return torch.ops.compilepass.rms_norm_rotate(x, weight, cos, sin, eps, variant)  # type: ignore[no-any-return]

    table = Input(("...", "H"), broadcasts=True)
    inputs = {"x": Input(("...", "H")), "weight": Input(("H",)), "cos": table, "sin": table}
    return Rule(norm_rotate, fused, inputs, name=f"norm_rotate_{variant}", dtypes=dtypes)


def _partial(variant: str, dtypes: tuple[torch.dtype, ...]) -> Rule:
    def norm_rotate(
        x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, width: int
    ) -> Tensor:
        return native.rms_norm_rotate(x, weight, cos, sin, eps, variant)

    def fused(
        x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, width: int
    ) -> Tensor:
        return torch.ops.compilepass.rms_norm_rotate(x, weight, cos, sin, eps, variant)  # type: ignore[no-any-return]

    table = Input(("...", "width"), broadcasts=True)
    inputs = {"x": Input(("...", "H")), "weight": Input(("H",)), "cos": table, "sin": table}
    return Rule(norm_rotate, fused, inputs, name=f"norm_rotate_partial_{variant}", dtypes=dtypes)
