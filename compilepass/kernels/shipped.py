"""The ops that ship, in the namespace ``compilepass``: schemas, fakes, native references.

A fake checks the shapes that the mathematics needs, since a kernel behind compiled code trusts it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import KernelError, did_you_mean
from . import native
from .registry import define

__all__ = ["SHIPPED"]

GELUS = ("none", "tanh")
NORMS = ("llama", "torch", "gemma")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _check_norm(x: Tensor, weight: Tensor, variant: str, residual: Tensor | None = None) -> None:
    if variant not in NORMS:
        raise KernelError(
            f"variant={variant!r} is not an RMSNorm.", hint=did_you_mean(variant, NORMS)
        )
    if x.dim() < 1 or weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise KernelError(
            f"A norm's weight is as wide as its input: x is {_shape(x)}, weight {_shape(weight)}."
        )
    if residual is not None and residual.shape != x.shape:
        raise KernelError(
            f"A residual has the shape of x: x is {_shape(x)}, residual {_shape(residual)}."
        )


def _normed_dtype(x: torch.dtype, weight: torch.dtype, variant: str) -> torch.dtype:
    return torch.promote_types(x, weight) if variant == "llama" else x


def _half(x: Tensor) -> list[int | torch.SymInt]:
    if x.dim() < 1 or x.shape[-1] % 2:
        raise KernelError(f"The last dim of x holds gate and value, one size each: {_shape(x)}.")
    return [*x.shape[:-1], x.shape[-1] // 2]


def _quantised(x: Tensor, shape: list[int | torch.SymInt]) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(shape, dtype=torch.int8),
        x.new_empty([*shape[:-1], 1], dtype=torch.float32),
    )


def _rms_norm(x: Tensor, weight: Tensor, eps: float, variant: str = "llama") -> Tensor:
    _check_norm(x, weight, variant)
    return x.new_empty(x.shape, dtype=_normed_dtype(x.dtype, weight.dtype, variant))


def _fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    _check_norm(x, weight, variant, residual)
    dtype = torch.promote_types(x.dtype, residual.dtype)
    normed = x.new_empty(x.shape, dtype=_normed_dtype(dtype, weight.dtype, variant))
    return normed, x.new_empty(x.shape, dtype=dtype)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    if gate.shape != up.shape:
        raise KernelError(f"gate and up have one shape: gate is {_shape(gate)}, up {_shape(up)}.")
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


def _rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    for x in (q, k):
        if x.dim() < 2 or 2 * cos.shape[-1] > x.shape[-1]:
            raise KernelError(
                f"A head holds two elements for each angle: x is {_shape(x)}, cos {_shape(cos)}."
            )
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    per_pair: bool = False,
    wide: bool = False,
) -> Tensor:
    width = cos.shape[-1] * (2 if per_pair else 1)
    if cos.shape[-1] != sin.shape[-1] or width % 2 or width > x.shape[-1]:
        raise KernelError(
            f"cos and sin hold a value for each {'pair of elements' if per_pair else 'element'} "
            f"that is rotated: x is {_shape(x)}, cos {_shape(cos)}, sin {_shape(sin)}."
        )
    for table in (cos, sin):
        sizes = zip(reversed(table.shape[:-1]), reversed(x.shape[:-1]), strict=False)
        if table.dim() > x.dim() or any(mine not in (1, theirs) for mine, theirs in sizes):
            raise KernelError(
                f"cos and sin broadcast against x: x is {_shape(x)}, one is {_shape(table)}."
            )
    return x.new_empty(x.shape)


def _quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    return _quantised(x, list(x.shape))


def _int8_linear(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if xq.dim() < 1 or wq.dim() != 2 or xq.shape[-1] != wq.shape[1]:
        raise KernelError(f"xq and wq are equally wide: xq is {_shape(xq)}, wq {_shape(wq)}.")
    return xq.new_empty([*xq.shape[:-1], wq.shape[0]], dtype=out_dtype)


def _rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    _check_norm(x, weight, variant)
    return _quantised(x, list(x.shape))


def _fused_add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor, Tensor]:
    _check_norm(x, weight, variant, residual)
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return *_quantised(x, list(x.shape)), total


def _silu_mul_quant(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _quantised(gate, list(_silu_mul(gate, up).shape))


def _silu_and_mul_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    return _quantised(x, _half(x))


SHIPPED = (
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
        "compilepass::rotary_embedding"
        "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)",
        native=native.rotary_embedding,
        fake=_rotary_embedding,
    ),
    define(
        "compilepass::rotate(Tensor x, Tensor cos, Tensor sin, bool interleaved=False, "
        "bool per_pair=False, bool wide=False) -> Tensor",
        native=native.rotate,
        fake=_rotate,
    ),
    define(
        "compilepass::quant_int8(Tensor x) -> (Tensor, Tensor)",
        native=native.quant_int8,
        fake=_quant_int8,
    ),
    define(
        "compilepass::int8_linear(Tensor xq, Tensor xscale, Tensor wq, Tensor wscale, "
        "Tensor? bias, ScalarType out_dtype) -> Tensor",
        native=native.int8_linear,
        fake=_int8_linear,
    ),
    define(
        "compilepass::rms_norm_dynamic_int8_quant"
        "(Tensor x, Tensor weight, float eps, str variant='llama') -> (Tensor, Tensor)",
        native=native.rms_norm_dynamic_int8_quant,
        fake=_rms_norm_quant,
    ),
    define(
        "compilepass::fused_add_rms_norm_dynamic_int8_quant"
        "(Tensor x, Tensor residual, Tensor weight, float eps, str variant='llama')"
        " -> (Tensor, Tensor, Tensor)",
        native=native.fused_add_rms_norm_dynamic_int8_quant,
        fake=_fused_add_rms_norm_quant,
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
