"""The ops of matrix multiplication."""

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
    return xq.new_empty(_sizes(xq, wq), dtype=out_dtype)


def _int8_dynamic_linear(
    x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    sizes = _sizes(x, wq)
    if residual is None:
        return x.new_empty(sizes)
    if list(residual.shape) != sizes:
        raise KernelError(
            f"A residual has the shape of the result: x is {shape(x)}, wq {shape(wq)}, "
            f"residual {shape(residual)}."
        )
    return x.new_empty(sizes, dtype=torch.promote_types(x.dtype, residual.dtype))


def _weight_only_int8_linear(x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(_sizes(x, wq))


def _linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is not None and bias.shape != w.shape[:1]:
        raise KernelError(f"A bias is as long as w: bias is {shape(bias)}, w {shape(w)}.")
    return x.new_empty(_sizes(x, w))


def _sizes(x: Tensor, w: Tensor) -> list[int | torch.SymInt]:
    if x.dim() < 1 or w.dim() != 2 or x.shape[-1] != w.shape[1]:
        raise KernelError(f"x and w are equally wide: x is {shape(x)}, w {shape(w)}.")
    return [*x.shape[:-1], w.shape[0]]


OPS = (
    define(
        "compilepass::linear(Tensor x, Tensor w, Tensor? bias=None) -> Tensor",
        native=native.linear,
        fake=_linear,
    ),
    define(
        "compilepass::int8_linear(Tensor xq, Tensor xscale, Tensor wq, Tensor wscale, "
        "Tensor? bias, ScalarType out_dtype) -> Tensor",
        native=native.int8_linear,
        fake=_int8_linear,
    ),
    define(
        "compilepass::int8_dynamic_linear(Tensor x, Tensor wq, Tensor wscale, Tensor? bias, "
        "Tensor? residual=None) -> Tensor",
        native=native.int8_dynamic_linear,
        fake=_int8_dynamic_linear,
    ),
    define(
        "compilepass::weight_only_int8_linear(Tensor x, Tensor wq, Tensor wscale, Tensor? bias)"
        " -> Tensor",
        native=native.weight_only_int8_linear,
        fake=_weight_only_int8_linear,
    ),
    define(
        "compilepass::fp8_linear(Tensor xq, Tensor xscale, Tensor wq, Tensor wscale, "
        "Tensor? bias, ScalarType out_dtype) -> Tensor",
        native=native.fp8_linear,
        fake=_int8_linear,
    ),
)
