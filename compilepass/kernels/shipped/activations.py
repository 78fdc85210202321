"""The ops of activations, gated and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import KernelError, did_you_mean
from .. import native
from ..registry import define
from .fakes import shape

__all__ = ["FAKES", "OPS"]

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


def _fatrelu_and_mul(x: Tensor, threshold: float) -> Tensor:
    return x.new_empty(_half(x))


def _swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    return x.new_empty(_half(x))


def _elementwise(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


# of what can be quantised in the same op
FAKES: dict[str, Callable[..., Any]] = {
    "silu_mul": _silu_mul,
    "gelu_mul": _gelu_mul,
    "silu_and_mul": _silu_and_mul,
    "gelu_and_mul": _gelu_and_mul,
    "mul_and_silu": _silu_and_mul,
    "fatrelu_and_mul": _fatrelu_and_mul,
    "swigluoai_and_mul": _swigluoai_and_mul,
}

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
        "compilepass::mul_and_silu(Tensor x) -> Tensor",
        native=native.mul_and_silu,
        fake=_silu_and_mul,
    ),
    define(
        "compilepass::fatrelu_and_mul(Tensor x, float threshold) -> Tensor",
        native=native.fatrelu_and_mul,
        fake=_fatrelu_and_mul,
    ),
    define(
        "compilepass::swigluoai_and_mul(Tensor x, float alpha=1.702, float limit=7.0) -> Tensor",
        native=native.swigluoai_and_mul,
        fake=_swigluoai_and_mul,
    ),
    define(
        "compilepass::gelu_new(Tensor x) -> Tensor",
        native=native.gelu_new,
        fake=_elementwise,
    ),
    define(
        "compilepass::gelu_fast(Tensor x) -> Tensor",
        native=native.gelu_fast,
        fake=_elementwise,
    ),
    define(
        "compilepass::quick_gelu(Tensor x) -> Tensor",
        native=native.quick_gelu,
        fake=_elementwise,
    ),
    define(
        "compilepass::relu2(Tensor x) -> Tensor",
        native=native.relu2,
        fake=_elementwise,
    ),
)
