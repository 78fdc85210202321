"""Heads that are normed, each by itself, and then rotated, in one kernel.

Before::

    x = weight * rms(x)
    y = x * cos + cat((-x[..., half:], x[..., :half]), -1) * sin

After::

    y = compilepass.rms_norm_rotate(x, weight, cos, sin, eps, variant)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, PassContext, Rule
from compilepass.kernels import native
from compilepass.rewrite import Input

from .norm_variants import VARIANTS

__all__ = ["FuseQKNormRope"]

#: variants of the norm of whole heads, and whether heads and tokens are exchanged behind it
WHOLE = (
    ("gemma", False),  # Gemma 3
    ("torch", False),  # Gemma 4
    ("llama", True),  # Qwen3
    ("llama", False),  # Exaone 4; Qwen3 with one token, where nothing is exchanged
)
#: the same of heads that are rotated in part
PARTIAL = (
    ("llama", True),  # GLM 4.5
    ("llama", False),
)

NormRotate = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


class FuseQKNormRope(FusionPass):
    """Queries and keys, one by one: by two halves, with tables as wide as what is rotated. Between
    norm and rotation, tokens and heads may be exchanged (``[B, S, heads, D]``, as in Qwen3). The
    norm's result must have no other user than the rotation.
    """

    name = "fuse_qk_norm_rope"
    covers = ("norm", "rotary")
    after = ("fuse_layer_norm",)
    before = ("fuse_add_rms_norm", "fuse_norm_quant", "fuse_rms_norm", "fuse_rope")
    requires = ("eliminate_common_subexpressions",)
    kernels = ("compilepass::rms_norm_rotate",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        # around a rotation there may be a cat with the rest of a head, so that comes first
        return [*(_partial(*norm) for norm in PARTIAL), *(_whole(*norm) for norm in WHOLE)]


def _whole(variant: str, transposes: bool) -> Rule:
    norm_rotate, fused = (_transposed if transposes else _in_place)(variant)
    inputs = _inputs("H", transposes)
    name = _name("norm_rotate", variant, transposes)
    return Rule(norm_rotate, fused, inputs, name=name, dtypes=VARIANTS[variant])


def _partial(variant: str, transposes: bool) -> Rule:
    whole, fused_whole = (_transposed if transposes else _in_place)(variant)

    def norm_rotate(
        x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, width: int
    ) -> Tensor:
        return whole(x, weight, cos, sin, eps)

    def fused(
        x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, width: int
    ) -> Tensor:
        return fused_whole(x, weight, cos, sin, eps)

    inputs = _inputs("width", transposes)
    name = _name("norm_rotate_partial", variant, transposes)
    return Rule(norm_rotate, fused, inputs, name=name, dtypes=VARIANTS[variant])


def _in_place(variant: str) -> tuple[NormRotate, NormRotate]:
    def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        return native.rms_norm_rotate(x, weight, cos, sin, eps, variant)

    def fused(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        return torch.ops.compilepass.rms_norm_rotate(x, weight, cos, sin, eps, variant)  # type: ignore[no-any-return]

    return norm_rotate, fused


def _transposed(variant: str) -> tuple[NormRotate, NormRotate]:
    def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        heads = native.rms_norm(x, weight, eps, variant).transpose(1, 2)
        return native.rotate(heads, cos, sin)

    def fused(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        # tokens before heads, as x lies in memory, and the value that is replaced, too
        cos, sin = cos.transpose(-3, -2), sin.transpose(-3, -2)
        op = torch.ops.compilepass.rms_norm_rotate
        return op(x, weight, cos, sin, eps, variant).transpose(1, 2)  # type: ignore[no-any-return]

    return norm_rotate, fused


def _inputs(rotated: str, transposes: bool) -> dict[str, Input]:
    """``rotated`` names how much of a head of ``H`` elements is rotated."""
    heads = ("...", "S", "N", "H") if transposes else ("...", "H")
    per_head = ("...", 1, "S", rotated) if transposes else ("...", rotated)
    table = Input(per_head, broadcasts=True)
    return {"x": Input(heads), "weight": Input(("H",)), "cos": table, "sin": table}


def _name(what: str, variant: str, transposes: bool) -> str:
    return "_".join((what, variant, *["transposed"] * transposes))
