"""Quantisation on Triton, of rows that are there already."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.library import triton_op

from .rows import outputs
from .sinks import quantise_rows, sink_for

__all__ = [
    "asymmetric_quant_int8",
    "group_quant_fp8",
    "quant_fp8",
    "quant_int8",
    "static_quant_fp8",
    "static_quant_int8",
]


def _quantised(op: str, kind: str, x: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    new = outputs(op, x, *settings)
    sink = sink_for(kind, new if isinstance(new, tuple) else (new,), settings)
    quantise_rows(x, sink)
    return sink.results


@triton_op("compilepass_triton::quant_int8", mutates_args=())
def quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = _quantised("quant_int8", "dynamic_int8", x)
    return q, scale


@triton_op("compilepass_triton::asymmetric_quant_int8", mutates_args=())
def asymmetric_quant_int8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, scale, zero_point = _quantised("asymmetric_quant_int8", "asymmetric_int8", x)
    return q, scale, zero_point


@triton_op("compilepass_triton::static_quant_int8", mutates_args=())
def static_quant_int8(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    if zero_point is None:
        return _quantised("static_quant_int8", "static_int8", x, scale)[0]
    return _quantised("static_quant_int8", "static_asymmetric_int8", x, scale, zero_point)[0]


@triton_op("compilepass_triton::quant_fp8", mutates_args=())
def quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = _quantised("quant_fp8", "dynamic_fp8", x)
    return q, scale


@triton_op("compilepass_triton::group_quant_fp8", mutates_args=())
def group_quant_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    q, scale = _quantised("group_quant_fp8", "group_fp8", x, group)
    return q, scale


@triton_op("compilepass_triton::static_quant_fp8", mutates_args=())
def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return _quantised("static_quant_fp8", "static_fp8", x, scale)[0]
