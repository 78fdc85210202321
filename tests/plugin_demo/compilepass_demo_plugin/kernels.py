"""Kernel ops of the package's own, and a further provider of one that compilepass has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compilepass.kernels import define, native, needs_grad, provider

define(
    "compilepass_demo::rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    native=native.rms_norm,
)


def quick_gelu(x: Tensor) -> Tensor:
    """The sigmoid approximation of GELU (arXiv:1606.08415, section 2)."""
    return x * torch.sigmoid(1.702 * x)


define("compilepass_demo::quick_gelu(Tensor x) -> Tensor", native=quick_gelu)


def register() -> None:
    """Called once by compilepass, before it binds any op to its kernels."""
    provider(
        "compilepass::rms_norm",
        name="demo",
        device_type="cpu",
        load=lambda: _rms_norm,
        priority=10,
        supports=_supports,
    )
    provider(
        "compilepass_demo::quick_gelu", name="demo", device_type="cpu", load=lambda: _quick_gelu
    )


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _supports(x: Tensor, weight: Tensor, eps: float) -> str | None:
    if x.shape[-1] % 2:
        return f"the hidden size {x.shape[-1]} is odd"
    if {x.dtype, weight.dtype} != {torch.float32}:
        return "only float32 is rounded as the op says"
    return "it has no backward" if needs_grad(x, weight) else None


def _quick_gelu(x: Tensor) -> Tensor:
    return F.silu(1.702 * x) / 1.702
