"""Gated activations: SwiGLU and GeGLU.

Before::

    y = silu(x[..., :I]) * x[..., I:]         # or gelu; gate and up may be two tensors

After::

    y = compilepass.silu_and_mul(x)           # compilepass.silu_mul(gate, up) for two tensors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, PassContext, Rule
from compilepass.kernels import native

__all__ = ["FuseActAndMul"]


def silu_and_mul(x: Tensor) -> Tensor:
    return native.silu_and_mul(x)


def fused_silu_and_mul(x: Tensor) -> Tensor:
    return torch.ops.compilepass.silu_and_mul(x)  # type: ignore[no-any-return]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return native.silu_mul(gate, up)


def fused_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.compilepass.silu_mul(gate, up)  # type: ignore[no-any-return]


class FuseActAndMul(FusionPass):
    """Two halves of one tensor, gate first, are read from it; any other two are two inputs."""

    name = "fuse_act_and_mul"
    covers = ("gate",)
    after = ("fuse_act_quant",)
    requires = ("eliminate_noops",)
    kernels = (
        "compilepass::gelu_and_mul",
        "compilepass::gelu_mul",
        "compilepass::silu_and_mul",
        "compilepass::silu_mul",
    )

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        halves = {"x": ("...", "2*I")}
        pair = {"gate": ("...", "I"), "up": ("...", "I")}
        gelus = ("none", "tanh")
        return [
            Rule(silu_and_mul, fused_silu_and_mul, halves),
            *(_gelu_and_mul(approximate, halves) for approximate in gelus),
            Rule(silu_mul, fused_silu_mul, pair),
            *(_gelu_mul(approximate, pair) for approximate in gelus),
        ]


def _gelu_and_mul(approximate: str, inputs: Mapping[str, tuple[str, ...]]) -> Rule:
    def gelu_and_mul(x: Tensor) -> Tensor:
        return native.gelu_and_mul(x, approximate)

    def fused(x: Tensor) -> Tensor:
        return torch.ops.compilepass.gelu_and_mul(x, approximate)  # type: ignore[no-any-return]

    return Rule(gelu_and_mul, fused, inputs, name=f"gelu_and_mul_{approximate}")


def _gelu_mul(approximate: str, inputs: Mapping[str, tuple[str, ...]]) -> Rule:
    def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
        return native.gelu_mul(gate, up, approximate)

    def fused(gate: Tensor, up: Tensor) -> Tensor:
        return torch.ops.compilepass.gelu_mul(gate, up, approximate)  # type: ignore[no-any-return]

    return Rule(gelu_mul, fused, inputs, name=f"gelu_mul_{approximate}")
