"""A pass: one rule that puts the package's own kernel op in a model's graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, PassContext, Phase, Rule

from .kernels import quick_gelu


def replacement(x: Tensor) -> Tensor:
    fused: Tensor = torch.ops.compilepass_demo.quick_gelu(x)
    return fused


class FuseQuickGelu(FusionPass):
    """``x * sigmoid(1.702 * x)`` becomes ``compilepass_demo::quick_gelu(x)``."""

    name = "fuse_quick_gelu"
    phase = Phase.FUSE
    kernels = ("compilepass_demo::quick_gelu",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        return [Rule(quick_gelu, replacement, inputs={"x": ("T", "H")})]
