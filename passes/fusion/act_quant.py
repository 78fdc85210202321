"""A gated activation and the int8 quantisation of its result.

Before::

    y = silu(x[..., :I]) * x[..., I:]
    q, scale = quant_int8(y)

After::

    q, scale = compilepass.silu_and_mul_dynamic_int8_quant(x)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, PassContext, Rule
from compilepass.kernels import native

__all__ = ["FuseActQuant"]


def silu_and_mul_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    return native.quant_int8(native.silu_and_mul(x))


def fused(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.compilepass.silu_and_mul_dynamic_int8_quant(x)  # type: ignore[no-any-return]


class FuseActQuant(FusionPass):
    """Gate and up are the two halves of one tensor, gate first."""

    name = "fuse_act_quant"
    requires = ("eliminate_common_subexpressions",)
    kernels = ("compilepass::silu_and_mul_dynamic_int8_quant",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        return [Rule(silu_and_mul_quant, fused, {"x": ("...", "2*I")})]
