"""LayerNorm in one kernel, with the residual add before it where there is one.

Before::

    total = residual + x
    y = (total - mean(total)) * rsqrt(var(total) + eps) * weight + bias

After::

    y, total = compilepass.fused_add_layer_norm(x, residual, weight, bias, eps)
    y = compilepass.layer_norm(x, weight, bias, eps)                              # without a sum
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, PassContext, Rule
from compilepass.kernels import native

__all__ = ["FuseLayerNorm"]


class FuseLayerNorm(FusionPass):
    """Norms with weight and bias, with a weight alone, and with neither.

    One that is written out holds an RMSNorm of ``x - mean(x)``, so it is looked for first.
    """

    name = "fuse_layer_norm"
    covers = ("norm",)
    before = ("fuse_add_rms_norm", "fuse_norm_quant", "fuse_rms_norm")
    requires = ("eliminate_noops",)
    kernels = ("compilepass::fused_add_layer_norm", "compilepass::layer_norm")

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        # what computes more comes first, since it holds what the others look for
        parameters = (("weight", "bias"), ("weight",), ())
        return [*map(_add_layer_norm, parameters), *map(_layer_norm, parameters)]


def layer_norm(
    x: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    return native.layer_norm(x, weight, bias, eps)


def fused_layer_norm(
    x: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    return torch.ops.compilepass.layer_norm(x, weight, bias, eps)  # type: ignore[no-any-return]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return native.fused_add_layer_norm(x, residual, weight, bias, eps)


def fused_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return torch.ops.compilepass.fused_add_layer_norm(x, residual, weight, bias, eps)  # type: ignore[no-any-return]


def _layer_norm(parameters: tuple[str, ...]) -> Rule:
    inputs = {"x": ("...", "H"), **dict.fromkeys(parameters, ("H",))}
    return Rule(layer_norm, fused_layer_norm, inputs, name=_name("layer_norm", parameters))


def _add_layer_norm(parameters: tuple[str, ...]) -> Rule:
    rows = dict.fromkeys(("x", "residual"), ("...", "H"))
    inputs = {**rows, **dict.fromkeys(parameters, ("H",))}
    name = _name("add_layer_norm", parameters)
    return Rule(add_layer_norm, fused_add_layer_norm, inputs, name=name)


def _name(what: str, parameters: tuple[str, ...]) -> str:
    return "_".join((what, *parameters)) if parameters else f"{what}_plain"
