"""The ops of rotary position embedding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import KernelError
from .. import native
from ..registry import define
from .fakes import shape
from .norms import check_rms_norm, normed_dtype

__all__ = ["OPS"]


def _rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    for x in (q, k):
        if x.dim() < 2 or 2 * cos.shape[-1] > x.shape[-1]:
            raise KernelError(
                f"A head holds two elements for each angle: x is {shape(x)}, cos {shape(cos)}."
            )
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    variant: str = "llama",
) -> tuple[Tensor, Tensor]:
    normed = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        check_rms_norm(x, weight, variant)
        normed.append(x.new_empty(x.shape, dtype=normed_dtype(x.dtype, weight.dtype, variant)))
    return _rotary_embedding(normed[0], normed[1], cos, sin, interleaved)


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
            f"that is rotated: x is {shape(x)}, cos {shape(cos)}, sin {shape(sin)}."
        )
    for table in (cos, sin):
        sizes = zip(reversed(table.shape[:-1]), reversed(x.shape[:-1]), strict=False)
        if table.dim() > x.dim() or any(mine not in (1, theirs) for mine, theirs in sizes):
            raise KernelError(
                f"cos and sin broadcast against x: x is {shape(x)}, one is {shape(table)}."
            )
    return x.new_empty(x.shape)


def _rotate_qk(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _rotate(q, *args), _rotate(k, *args)


def _rms_norm_rotate(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    variant: str = "llama",
    interleaved: bool = False,
    per_pair: bool = False,
) -> Tensor:
    check_rms_norm(x, weight, variant)
    normed = x.new_empty(x.shape, dtype=normed_dtype(x.dtype, weight.dtype, variant))
    return _rotate(normed, cos, sin, interleaved, per_pair)


def _rms_norm_rotate_qk(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    return _rms_norm_rotate(q, q_weight, *args), _rms_norm_rotate(k, k_weight, *args)


OPS = (
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
        "compilepass::rotate_qk(Tensor q, Tensor k, Tensor cos, Tensor sin, "
        "bool interleaved=False, bool per_pair=False, bool wide=False) -> (Tensor, Tensor)",
        native=native.rotate_qk,
        fake=_rotate_qk,
    ),
    define(
        "compilepass::qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, "
        "Tensor cos, Tensor sin, float eps, bool interleaved, str variant='llama')"
        " -> (Tensor, Tensor)",
        native=native.qk_norm_rope,
        fake=_qk_norm_rope,
    ),
    define(
        "compilepass::rms_norm_rotate(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps, "
        "str variant='llama', bool interleaved=False, bool per_pair=False) -> Tensor",
        native=native.rms_norm_rotate,
        fake=_rms_norm_rotate,
    ),
    define(
        "compilepass::rms_norm_rotate_qk(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, "
        "Tensor cos, Tensor sin, float eps, str variant='llama', bool interleaved=False, "
        "bool per_pair=False) -> (Tensor, Tensor)",
        native=native.rms_norm_rotate_qk,
        fake=_rms_norm_rotate_qk,
    ),
)
