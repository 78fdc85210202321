"""A linear layer becomes a kernel that is faster than what PyTorch calls on this machine.

Before::

    y = x @ w.t()                          # or addmm(bias, x, w.t())

After::

    y = compilepass.linear(x, w, bias)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, Input, Match, PassContext, Phase, Reject, Rule
from compilepass.kernels import native

__all__ = ["FuseLinear"]


class FuseLinear(FusionPass):
    """It comes last, so that what knows more of a linear layer (that its weight is quantised, or
    what is done with its result) has it first.

    Platforms: the CPU. One token or two, as in decoding, in float32, bfloat16 or float16, where the
    weight is read in one stream; and more in float32, where the machine is faster with oneDNN than
    with MKL. ``x``: ``[T, K]``, ``w``: ``[N, K]``, row by row in memory. The op's kernels say what
    they take.
    """

    name = "fuse_linear"
    phase = Phase.LOWER
    kernels = ("compilepass::linear",)

    smallest: int = 1 << 20
    """Elements of a weight from which on the call of a kernel is worth it."""

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        smallest = self.smallest

        def is_large(match: Match) -> Reject | None:
            size = match.dims["K"] * match.dims["N"]
            if isinstance(size, int) and size >= smallest:
                return None
            return match.reject(f"the weight has {size} elements, fewer than {smallest}")

        inputs = {"x": Input(("T", "K")), "w": Input(("N", "K"))}
        return [
            Rule(linear_bias, fused_bias, {**inputs, "bias": Input(("N",))}, is_large),
            Rule(linear, fused, inputs, is_large),
        ]


def linear_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return native.linear(x, w, bias)


def linear(x: Tensor, w: Tensor) -> Tensor:
    return native.linear(x, w)


def fused_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.compilepass.linear(x, w, bias)  # type: ignore[no-any-return]


def fused(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.compilepass.linear(x, w)  # type: ignore[no-any-return]
