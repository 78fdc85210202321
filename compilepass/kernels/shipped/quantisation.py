"""The ops of quantisation of activations, and those of norms and gates with one after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import KernelError
from .. import native
from ..native.fused_quantisation import FUSED, QUANTISATIONS, SOURCES, fuse
from ..registry import KernelOp, define
from .activations import FAKES as GATES
from .fakes import quantised, shape
from .norms import FAKES as NORMS

__all__ = ["OPS"]


def _quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(x, list(x.shape))


def _asymmetric_quant_int8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, scale = quantised(x, list(x.shape))
    return q, scale, scale.new_empty(scale.shape, dtype=torch.int32)


def _static_quant_int8(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    _check_one("scale", scale)
    if zero_point is not None:
        _check_one("zero_point", zero_point)
    return x.new_empty(x.shape, dtype=torch.int8)


def _quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(x, list(x.shape), native.FP8)


def _static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    _check_one("scale", scale)
    return x.new_empty(x.shape, dtype=native.FP8)


def _group_quant_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    if x.dim() < 1 or group < 1 or x.shape[-1] % group:
        raise KernelError(f"A row is whole groups: x is {shape(x)}, a group {group}.")
    q, _ = quantised(x, list(x.shape), native.FP8)
    return q, x.new_empty([*x.shape[:-1], x.shape[-1] // group], dtype=torch.float32)


def _check_one(name: str, t: Tensor) -> None:
    if t.numel() != 1:
        raise KernelError(f"{name} is one number for the whole tensor, not {shape(t)}.")


_QUANTISED: dict[str, Callable[..., Any]] = {
    "dynamic_int8": _quant_int8,
    "asymmetric_int8": _asymmetric_quant_int8,
    "static_int8": _static_quant_int8,
    "static_asymmetric_int8": _static_quant_int8,
    "dynamic_fp8": _quant_fp8,
    "static_fp8": _static_quant_fp8,
    "group_fp8": _group_quant_fp8,
}
_MADE: dict[str, Callable[..., Any]] = {**NORMS, **GATES}


def _fused(source_name: str, name: str) -> KernelOp:
    source, quantisation = SOURCES[source_name], QUANTISATIONS[name]
    arguments = ", ".join((*source.tensors, *quantisation.settings, *source.options))
    results = quantisation.results + source_name.startswith("fused_add")
    returns = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    fused_name = f"{source_name}_{name}_quant"
    return define(
        f"compilepass::{fused_name}({arguments}) -> {returns}",
        native=FUSED[fused_name],
        fake=fuse(
            replace(source, function=_MADE[source_name]),
            replace(quantisation, function=_QUANTISED[name]),
        ),
    )


OPS = (
    define(
        "compilepass::quant_int8(Tensor x) -> (Tensor, Tensor)",
        native=native.quant_int8,
        fake=_quant_int8,
    ),
    define(
        "compilepass::asymmetric_quant_int8(Tensor x) -> (Tensor, Tensor, Tensor)",
        native=native.asymmetric_quant_int8,
        fake=_asymmetric_quant_int8,
    ),
    define(
        "compilepass::static_quant_int8(Tensor x, Tensor scale, Tensor? zero_point=None) -> Tensor",
        native=native.static_quant_int8,
        fake=_static_quant_int8,
    ),
    define(
        "compilepass::quant_fp8(Tensor x) -> (Tensor, Tensor)",
        native=native.quant_fp8,
        fake=_quant_fp8,
    ),
    define(
        "compilepass::group_quant_fp8(Tensor x, int group) -> (Tensor, Tensor)",
        native=native.group_quant_fp8,
        fake=_group_quant_fp8,
    ),
    define(
        "compilepass::static_quant_fp8(Tensor x, Tensor scale) -> Tensor",
        native=native.static_quant_fp8,
        fake=_static_quant_fp8,
    ),
    *(_fused(source, name) for source in SOURCES for name in QUANTISATIONS),
)
