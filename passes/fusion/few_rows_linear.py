"""A linear layer on one token, or two, becomes a kernel that reads the weight as fast as it can.

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

__all__ = ["FuseFewRowsLinear"]

MOST = 2  # rows of x; for more, what PyTorch has is as fast


class FuseFewRowsLinear(FusionPass):
    """Decoding, where every weight is read for one token. It comes last, so that what knows more
    of a linear layer (that its weight is quantised, or what is done with its result) has it first.

    Platforms: where the op has a kernel, which is the CPU. ``x``: ``[T, K]`` with ``T`` known and
    at most ``MOST``, in float32, bfloat16 or float16; ``w``: ``[N, K]``, row by row in memory.
    """

    name = "fuse_few_rows_linear"
    phase = Phase.LOWER
    kernels = ("compilepass::linear",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        inputs = {"x": Input(("T", "K")), "w": Input(("N", "K"))}
        biased = {**inputs, "bias": Input(("N",))}
        return [
            Rule(linear_bias, fused_bias, biased, check=is_few),
            Rule(linear, fused, inputs, check=is_few),
        ]


def linear_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return native.linear(x, w, bias)


def linear(x: Tensor, w: Tensor) -> Tensor:
    return native.linear(x, w)


def fused_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.compilepass.linear(x, w, bias)  # type: ignore[no-any-return]


def fused(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.compilepass.linear(x, w)  # type: ignore[no-any-return]


def is_few(match: Match) -> Reject | None:
    rows = match.dims["T"]
    if not isinstance(rows, int) or rows > MOST:
        return match.reject(
            f"x has {rows} rows, and the kernel is for {MOST} at most",
            hint="Larger products are left to PyTorch.",
        )
    if not match.inputs["w"].meta["val"].is_contiguous():
        return match.reject("the weight does not lie row by row in memory")
    return None
