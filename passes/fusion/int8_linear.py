"""The native form of an int8 linear layer becomes one int8 matrix multiplication.

Before::

    y = ((xq.float() @ wq.float().t()) * xscale * wscale + bias).to(dtype)

After::

    y = compilepass.int8_linear(xq, xscale, wq, wscale, bias, dtype)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, Input, PassContext, Rule
from compilepass.kernels import native

__all__ = ["FuseInt8Linear"]

_INPUTS = {
    "xq": Input(("T", "K"), torch.int8),
    "xscale": Input(("T", 1), torch.float32),
    "wq": Input(("N", "K"), torch.int8),
    "wscale": Input(("N",), torch.float32),
}


class FuseInt8Linear(FusionPass):
    """Per-token activation scales, per-channel weight scales, with and without bias."""

    name = "fuse_int8_linear"
    after = ("fuse_norm_quant", "fuse_act_quant")
    kernels = ("compilepass::int8_linear",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        # the float32 form is a part of the others, which end with a cast
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        return [rule for dtype in dtypes for rule in (_with_bias(dtype), _without_bias(dtype))]


def _with_bias(dtype: torch.dtype) -> Rule:
    def int8_linear_bias(
        xq: Tensor, xscale: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor
    ) -> Tensor:
        return native.int8_linear(xq, xscale, wq, wscale, bias, dtype)

    def fused(xq: Tensor, xscale: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.compilepass.int8_linear(xq, xscale, wq, wscale, bias, dtype)  # type: ignore[no-any-return]

    inputs = {**_INPUTS, "bias": Input(("N",), dtype)}
    return Rule(int8_linear_bias, fused, inputs, name=f"int8_linear_bias_{_short(dtype)}")


def _without_bias(dtype: torch.dtype) -> Rule:
    def int8_linear(xq: Tensor, xscale: Tensor, wq: Tensor, wscale: Tensor) -> Tensor:
        return native.int8_linear(xq, xscale, wq, wscale, None, dtype)

    def fused(xq: Tensor, xscale: Tensor, wq: Tensor, wscale: Tensor) -> Tensor:
        return torch.ops.compilepass.int8_linear(xq, xscale, wq, wscale, None, dtype)  # type: ignore[no-any-return]

    return Rule(int8_linear, fused, _INPUTS, name=f"int8_linear_{_short(dtype)}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
