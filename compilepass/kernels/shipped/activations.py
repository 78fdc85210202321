"""The ops of gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import KernelError, did_you_mean
from .. import native
from ..registry import define
from .fakes import quantised, shape

__all__ = ["OPS"]

GELUS = ("none", "tanh")


def _half(x: Tensor) -> list[int | torch.SymInt]:
    if x.dim() < 1 or x.shape[-1] % 2:
        raise KernelError(f"The last dim of x holds gate and value, one size each: {shape(x)}.")
    return [*x.shape[:-1], x.shape[-1] // 2]


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    if gate.shape != up.shape:
        raise KernelError(f"gate and up have one shape: gate is {shape(gate)}, up {shape(up)}.")
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _gelu_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    _check_gelu(approximate)
    return _silu_mul(gate, up)


def _silu_and_mul(x: Tensor) -> Tensor:
    return x.new_empty(_half(x))


def _gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    _check_gelu(approximate)
    return _silu_and_mul(x)


def _check_gelu(approximate: str) -> None:
    if approximate not in GELUS:
        raise KernelError(
            f"approximate={approximate!r} is not a GELU.", hint=did_you_mean(approximate, GELUS)
        )


def _silu_mul_quant(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(gate, list(_silu_mul(gate, up).shape))


def _silu_and_mul_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(x, _half(x))


OPS = (
    define(
        "compilepass::silu_mul(Tensor gate, Tensor up) -> Tensor",
        native=native.silu_mul,
        fake=_silu_mul,
    ),
    define(
        "compilepass::gelu_mul(Tensor gate, Tensor up, str approximate) -> Tensor",
        native=native.gelu_mul,
        fake=_gelu_mul,
    ),
    define(
        "compilepass::silu_and_mul(Tensor x) -> Tensor",
        native=native.silu_and_mul,
        fake=_silu_and_mul,
    ),
    define(
        "compilepass::gelu_and_mul(Tensor x, str approximate) -> Tensor",
        native=native.gelu_and_mul,
        fake=_gelu_and_mul,
    ),
    define(
        "compilepass::silu_mul_dynamic_int8_quant(Tensor gate, Tensor up) -> (Tensor, Tensor)",
        native=native.silu_mul_dynamic_int8_quant,
        fake=_silu_mul_quant,
    ),
    define(
        "compilepass::silu_and_mul_dynamic_int8_quant(Tensor x) -> (Tensor, Tensor)",
        native=native.silu_and_mul_dynamic_int8_quant,
        fake=_silu_and_mul_quant,
    ),
)
