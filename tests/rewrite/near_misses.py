"""Models that nearly have the form of a rule: what a user would write, and get no fusion for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compilepass.kernels import native
from compilepass.rewrite import Rule

NORM = {"x": ("T", "H"), "weight": ("H",)}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return native.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return native.fused_add_rms_norm(x, residual, weight, eps)


def quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    return native.quant_int8(x)


def silu_and_mul_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    return native.quant_int8(native.silu_and_mul(x))


def gelu_and_mul(x: Tensor) -> Tensor:
    return native.gelu_and_mul(x)


RMS_NORM = Rule(rms_norm, rms_norm, NORM)
ADD_RMS_NORM = Rule(add_rms_norm, add_rms_norm, {**NORM, "residual": ("T", "H")})
QUANT = Rule(quant_int8, quant_int8, {"x": ("T", "H")})
SILU_QUANT = Rule(silu_and_mul_quant, silu_and_mul_quant, {"x": ("T", "2*I")})
GELU = Rule(gelu_and_mul, gelu_and_mul, {"x": ("T", "2*I")})


def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, (64,), w, None, 1e-6)


def mean_of_columns(x: Tensor, w: Tensor) -> Tensor:
    variance = x.pow(2).mean(0, keepdim=True)
    return w * (x * torch.rsqrt(variance + 1e-6))


def no_eps(x: Tensor, w: Tensor) -> Tensor:
    variance = x.pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance))


def weight_added(x: Tensor, w: Tensor) -> Tensor:
    variance = x.pow(2).mean(-1, keepdim=True)
    return w + (x * torch.rsqrt(variance + 1e-6))


def residual_subtracted(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x - r
    variance = total.pow(2).mean(-1, keepdim=True)
    return w * (total * torch.rsqrt(variance + 1e-6)), total


def weight_of_another_dtype(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return w.float() * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def other_bound(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return torch.round(x / scale).clamp(-100, 100).to(torch.int8), scale


def no_round(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return (x / scale).clamp(-128, 127).to(torch.int8), scale


def other_cast(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return torch.round(x / scale).clamp(-128, 127).to(torch.int16), scale


def relu_for_silu(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.relu(x[..., :32]) * x[..., 32:]
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return torch.round(y / scale).clamp(-128, 127).to(torch.int8), scale


def tanh_for_erf(x: Tensor) -> Tensor:
    return F.gelu(x[..., :32], approximate="tanh") * x[..., 32:]


def normed_value_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * normed, normed


X, R, W = torch.randn(8, 64), torch.randn(8, 64), torch.randn(64)


@dataclass(frozen=True)
class NearMissCase:
    rule: Rule
    model: Callable[..., object]
    args: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        return self.model.__name__


CASES = [
    NearMissCase(RMS_NORM, layer_norm, (X, W)),
    NearMissCase(RMS_NORM, mean_of_columns, (X, W)),
    NearMissCase(RMS_NORM, no_eps, (X, W)),
    NearMissCase(RMS_NORM, weight_added, (X, W)),
    NearMissCase(ADD_RMS_NORM, residual_subtracted, (X, R, W)),
    NearMissCase(RMS_NORM, weight_of_another_dtype, (X.bfloat16(), W)),
    NearMissCase(QUANT, other_bound, (X,)),
    NearMissCase(QUANT, no_round, (X,)),
    NearMissCase(QUANT, other_cast, (X,)),
    NearMissCase(SILU_QUANT, relu_for_silu, (X,)),
    NearMissCase(GELU, tanh_for_erf, (X,)),
    NearMissCase(RMS_NORM, normed_value_returned, (X, W)),
]
