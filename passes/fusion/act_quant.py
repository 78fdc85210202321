"""A gated activation and the int8 quantisation of its result.

Before::

    y = silu(x[..., :I]) * x[..., I:]
    q, scale = quant_int8(y)

After::

    q, scale = compilepass.silu_and_mul_dynamic_int8_quant(x)

With gate and up as two tensors, ``compilepass.silu_mul_dynamic_int8_quant(gate, up)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, PassContext, Rule
from compilepass.kernels import native

__all__ = ["FuseActQuant"]


def silu_and_mul_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    return native.silu_and_mul_dynamic_int8_quant(x)


def fused_silu_and_mul_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.compilepass.silu_and_mul_dynamic_int8_quant(x)  # type: ignore[no-any-return]


def silu_mul_quant(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return native.silu_mul_dynamic_int8_quant(gate, up)


def fused_silu_mul_quant(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.compilepass.silu_mul_dynamic_int8_quant(gate, up)  # type: ignore[no-any-return]


class FuseActQuant(FusionPass):
    """Two halves of one tensor, gate first, are read from it; any other two are two inputs."""

    name = "fuse_act_quant"
    covers = ("gate",)
    requires = ("eliminate_common_subexpressions",)
    kernels = (
        "compilepass::silu_and_mul_dynamic_int8_quant",
        "compilepass::silu_mul_dynamic_int8_quant",
    )

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        pair = {"gate": ("...", "I"), "up": ("...", "I")}
        return [
            Rule(silu_and_mul_quant, fused_silu_and_mul_quant, {"x": ("...", "2*I")}),
            Rule(silu_mul_quant, fused_silu_mul_quant, pair),
        ]
