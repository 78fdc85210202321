"""The native form of an int8 linear layer becomes one int8 matrix multiplication.

Before::

    y = ((xq.float() @ wq.float().t()) * xscale * wscale + bias).to(dtype)
    y = (_int_mm(xq, wq.t()).float() * xscale * wscale + bias).to(dtype)

    moved = (xq.int() + 128).to(uint8)                                    # torchao on the CPU
    product = _int_mm(moved, wq.t()) - wq.t().sum(0, True) * 128
    y = ((product.float() * xscale).to(dtype) * wscale + bias).to(dtype)

After::

    y = compilepass.int8_linear(xq, xscale, wq, wscale, bias, dtype)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

Spelling = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None", torch.dtype], Tensor]


class FuseInt8Linear(FusionPass):
    """Per-token activation scales, per-channel weight scales, with and without bias.

    Platforms: where the op has a kernel, which is the CPU. Both operands are int8 and scales
    float32; the result is float32, bfloat16 or float16. What torchao makes with int8 activations
    and weights is among the spellings; it rounds once more than the op does.
    """

    name = "fuse_int8_linear"
    after = ("fuse_norm_quant", "fuse_act_quant")
    kernels = ("compilepass::int8_linear",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        # the float32 form is a part of the others, which end with a cast
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        every = (native.int8_linear, int_mm, int_mm_moved)
        of_half = (int_mm_rounded, int_mm_moved_rounded)
        return [
            _rule(spelling, dtype, with_bias)
            for dtype in dtypes
            for spelling in (every if dtype is torch.float32 else (*of_half, *every))
            for with_bias in (True, False)
        ]


def int_mm(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return _scaled(torch._int_mm(xq, wq.t()), xscale, wscale, bias, dtype)


def int_mm_moved(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return _scaled(_moved_product(xq, wq), xscale, wscale, bias, dtype)


def int_mm_rounded(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return _rounded(torch._int_mm(xq, wq.t()), xscale, wscale, bias, dtype)


def int_mm_moved_rounded(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return _rounded(_moved_product(xq, wq), xscale, wscale, bias, dtype)


def _moved_product(xq: Tensor, wq: Tensor) -> Tensor:
    """The product of unsigned ``xq + 128``, which oneDNN is made for, less what that adds."""
    columns = wq.t()
    moved = (xq.to(torch.int32) + 128).to(torch.uint8)
    return torch._int_mm(moved, columns) - columns.sum(0, keepdim=True, dtype=torch.int32) * 128


def _scaled(
    product: Tensor, xscale: Tensor, wscale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out = product.float() * xscale * wscale
    return (out if bias is None else out + bias.float()).to(dtype)


def _rounded(
    product: Tensor, xscale: Tensor, wscale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out = (product.float() * xscale).to(dtype) * wscale
    return (out if bias is None else out + bias.float()).to(dtype)


def _rule(spelling: Spelling, dtype: torch.dtype, with_bias: bool) -> Rule:
    def pattern(
        xq: Tensor, xscale: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return spelling(xq, xscale, wq, wscale, bias, dtype)

    def fused(
        xq: Tensor, xscale: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return torch.ops.compilepass.int8_linear(xq, xscale, wq, wscale, bias, dtype)  # type: ignore[no-any-return]

    inputs = {**_INPUTS, "bias": Input(("N",), dtype)} if with_bias else _INPUTS
    what = spelling.__name__ + ("_bias" if with_bias else "")
    return Rule(pattern, fused, inputs, name=f"{what}_{str(dtype).removeprefix('torch.')}")
