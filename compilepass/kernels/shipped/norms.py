"""The ops of norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import KernelError, did_you_mean
from .. import native
from ..registry import define
from .fakes import shape

__all__ = ["FAKES", "OPS", "check_rms_norm", "normed_dtype"]

VARIANTS = ("llama", "torch", "gemma")


def check_rms_norm(x: Tensor, weight: Tensor, variant: str, residual: Tensor | None = None) -> None:
    if variant not in VARIANTS:
        raise KernelError(
            f"variant={variant!r} is not an RMSNorm.", hint=did_you_mean(variant, VARIANTS)
        )
    if x.dim() < 1 or weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise KernelError(
            f"A norm's weight is as wide as its input: x is {shape(x)}, weight {shape(weight)}."
        )
    _check_residual(x, residual)


def _check_residual(x: Tensor, residual: Tensor | None) -> None:
    if residual is not None and residual.shape != x.shape:
        raise KernelError(
            f"A residual has the shape of x: x is {shape(x)}, residual {shape(residual)}."
        )


def normed_dtype(x: torch.dtype, weight: torch.dtype, variant: str) -> torch.dtype:
    return torch.promote_types(x, weight) if variant == "llama" else x


def _rms_norm(x: Tensor, weight: Tensor, eps: float, variant: str = "llama") -> Tensor:
    check_rms_norm(x, weight, variant)
    return x.new_empty(x.shape, dtype=normed_dtype(x.dtype, weight.dtype, variant))


def _fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    check_rms_norm(x, weight, variant, residual)
    dtype = torch.promote_types(x.dtype, residual.dtype)
    normed = x.new_empty(x.shape, dtype=normed_dtype(dtype, weight.dtype, variant))
    return normed, x.new_empty(x.shape, dtype=dtype)


def _check_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
) -> None:
    for name, parameter in (("weight", weight), ("bias", bias)):
        if x.dim() < 1 or (parameter is not None and parameter.shape != x.shape[-1:]):
            raise KernelError(
                f"A norm's {name} is as wide as its input: x is {shape(x)}, {name} "
                f"{None if parameter is None else shape(parameter)}."
            )
    _check_residual(x, residual)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    _check_layer_norm(x, weight, bias)
    return x.new_empty(x.shape)


def _fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    _check_layer_norm(x, weight, bias, residual)
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=dtype)


# of what can be quantised in the same op
FAKES: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "layer_norm": _layer_norm,
    "fused_add_layer_norm": _fused_add_layer_norm,
}

OPS = (
    define(
        "compilepass::rms_norm(Tensor x, Tensor weight, float eps, str variant='llama') -> Tensor",
        native=native.rms_norm,
        fake=_rms_norm,
    ),
    define(
        "compilepass::fused_add_rms_norm"
        "(Tensor x, Tensor residual, Tensor weight, float eps, str variant='llama')"
        " -> (Tensor, Tensor)",
        native=native.fused_add_rms_norm,
        fake=_fused_add_rms_norm,
    ),
    define(
        "compilepass::layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
        native=native.layer_norm,
        fake=_layer_norm,
    ),
    define(
        "compilepass::fused_add_layer_norm"
        "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
        native=native.fused_add_layer_norm,
        fake=_fused_add_layer_norm,
    ),
)
