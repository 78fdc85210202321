"""FlashInfer's kernels (package ``flashinfer-python``), under the signatures of ours.

Its fused add and norm writes over both its inputs; copying them first would cost what fusing saves,
so it is not here.
"""

from __future__ import annotations

import flashinfer
import torch
from torch import Tensor

__all__ = ["gelu_and_mul", "rms_norm", "silu_and_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, variant: str = "llama") -> Tensor:
    norm = flashinfer.gemma_rmsnorm if variant == "gemma" else flashinfer.rmsnorm
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    if rows.numel():
        norm(rows, weight.contiguous(), eps, out=out)
    return out.view(x.shape)


def silu_and_mul(x: Tensor) -> Tensor:
    return _gated(flashinfer.silu_and_mul, x)


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    tanh = approximate == "tanh"
    return _gated(flashinfer.gelu_tanh_and_mul if tanh else flashinfer.gelu_and_mul, x)


def _gated(kernel: object, x: Tensor) -> Tensor:
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if out.numel():
        assert callable(kernel)
        kernel(x.contiguous(), out)
    return out
