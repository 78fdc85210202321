"""The ops of quantisation of activations."""

from __future__ import annotations

from torch import Tensor

from .. import native
from ..registry import define
from .fakes import quantised

__all__ = ["OPS"]


def _quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantised(x, list(x.shape))


OPS = (
    define(
        "compilepass::quant_int8(Tensor x) -> (Tensor, Tensor)",
        native=native.quant_int8,
        fake=_quant_int8,
    ),
)
