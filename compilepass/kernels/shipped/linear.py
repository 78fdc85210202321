"""The ops of matrix multiplication of quantised operands."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import KernelError
from .. import native
from ..registry import define
from .fakes import shape

__all__ = ["OPS"]


def _int8_linear(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if xq.dim() < 1 or wq.dim() != 2 or xq.shape[-1] != wq.shape[1]:
        raise KernelError(f"xq and wq are equally wide: xq is {shape(xq)}, wq {shape(wq)}.")
    return xq.new_empty([*xq.shape[:-1], wq.shape[0]], dtype=out_dtype)


OPS = (
    define(
        "compilepass::int8_linear(Tensor xq, Tensor xscale, Tensor wq, Tensor wscale, "
        "Tensor? bias, ScalarType out_dtype) -> Tensor",
        native=native.int8_linear,
        fake=_int8_linear,
    ),
)
