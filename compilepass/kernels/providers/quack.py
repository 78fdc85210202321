"""QuACK's CuTe kernels (package ``quack-kernels``), under the signatures of ours.

The functions below its autograd are called: what needs a gradient runs native.
"""

from __future__ import annotations

from quack.rmsnorm import rmsnorm_fwd
from quack.rotary import apply_rotary
from torch import Tensor

__all__ = ["fused_add_rms_norm", "rms_norm", "rotary_embedding"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, variant: str = "llama") -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out: Tensor = rmsnorm_fwd(rows, weight.contiguous(), eps=eps, weight_offset=_offset(variant))[0]
    return out.view(x.shape)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    rows, residuals = (t.reshape(-1, t.shape[-1]).contiguous() for t in (x, residual))
    out, total, _ = rmsnorm_fwd(
        rows, weight.contiguous(), residual=residuals, eps=eps, weight_offset=_offset(variant)
    )
    return out.view(x.shape), total.view(x.shape)


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    cos, sin = (t.reshape(-1, t.shape[-1]) for t in (cos, sin))
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if x.numel() == 0:
        return x.new_empty(x.shape)
    sequence = x.reshape(1, -1, *x.shape[-2:]).contiguous()
    out: Tensor = apply_rotary(sequence, cos, sin, interleaved=interleaved)
    return out.view(x.shape)


def _offset(variant: str) -> float:
    return 1.0 if variant == "gemma" else 0.0
