"""Quantisation of activations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OpValueError
from ..kernels import native
from ..ops import CustomOp

__all__ = ["QuantInt8"]


@CustomOp.register("quant_int8", dynamic_arg_dims={"x": 0})
class QuantInt8(CustomOp):
    """Symmetric dynamic int8 quantisation with one scale a row: ``x ≈ q * scale``.

    ``x``: ``[..., H]``; returns ``q`` int8 ``[..., H]`` and ``scale`` fp32 ``[..., 1]``, the row's
    largest magnitude over 127.

    Raises ``OpValueError`` for a scalar and for rows of no elements, which have no largest one.
    """

    def forward_native(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _check_rows(x)
        return native.quant_int8(x)

    def forward_cpu(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _check_rows(x)
        quantised: tuple[Tensor, Tensor] = torch.ops.compilepass.quant_int8(x)
        return quantised

    forward_cuda = forward_cpu


def _check_rows(x: Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise OpValueError(
            f"QuantInt8 got x of the shape {tuple(x.shape)}",
            why="The scale of a row is taken from its largest element.",
            hint="Give x of the shape [..., H] with H > 0.",
        )
