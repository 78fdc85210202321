"""Rotary position embedding on Triton.

Rows lie anywhere: three leading dimensions, each with a stride for ``x`` and for the tables, are
enough for a model's heads; more are merged, or copied where they cannot be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from .rows import one_if_interpreted, outputs, rounded, weighted

__all__ = [
    "qk_norm_rope",
    "rms_norm_rotate",
    "rms_norm_rotate_qk",
    "rotary_embedding",
    "rotate",
    "rotate_qk",
]

DIMS = 3  # leading dimensions that the kernel counts along


@triton.jit
def _times(a, b, dtype: tl.constexpr, WIDE: tl.constexpr):
    """A rounded product. As ``a * b`` the compiler would fuse it with the sum that follows, also
    across the rounding: it narrows both to ``dtype`` first. It has to leave ``fma`` as it is.
    """
    product = tl.fma(a, b, tl.zeros_like(a))
    return product if WIDE else rounded(product, dtype)


@triton.jit
def _table(pointer, at, mask, dtype: tl.constexpr):
    return rounded(tl.load(pointer + at, mask, 0.0).to(tl.float32), dtype)


@triton.jit
def _normed(value, scale, weight, mask, dtype: tl.constexpr, VARIANT: tl.constexpr):
    return weighted(value * scale, tl.load(weight, mask, 0.0).to(tl.float32), dtype, VARIANT)


@triton.jit
def _rotate_rows(
    x,
    weight,
    out,
    rows,
    size1,
    size2,
    x0,
    x1,
    x2,
    cos0,
    cos1,
    cos2,
    sin0,
    sin1,
    sin2,
    other_x,
    other_weight,
    other_out,
    other_rows,
    other_size1,
    other_size2,
    other_x0,
    other_x1,
    other_x2,
    other_cos0,
    other_cos1,
    other_cos2,
    other_sin0,
    other_sin1,
    other_sin2,
    cos,
    sin,
    eps,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr,
    WIDE: tl.constexpr,
    VARIANT: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    half: tl.constexpr = TURNED // 2
    program = tl.program_id(0).to(tl.int64)
    if PAIRED:  # the programs behind those of x are of the other tensor
        before = tl.cdiv(rows, ROWS)
        other = program >= before
        if other:
            x = other_x
            weight = other_weight
            out = other_out
        program = tl.where(other, program - before, program)
        rows = tl.where(other, other_rows, rows)
        size1 = tl.where(other, other_size1, size1)
        size2 = tl.where(other, other_size2, size2)
        x0 = tl.where(other, other_x0, x0)
        x1 = tl.where(other, other_x1, x1)
        x2 = tl.where(other, other_x2, x2)
        cos0 = tl.where(other, other_cos0, cos0)
        cos1 = tl.where(other, other_cos1, cos1)
        cos2 = tl.where(other, other_cos2, cos2)
        sin0 = tl.where(other, other_sin0, sin0)
        sin1 = tl.where(other, other_sin1, sin1)
        sin2 = tl.where(other, other_sin2, sin2)
    row = (program * ROWS + tl.arange(0, ROWS))[:, None]
    here = row < rows
    i2 = row % size2
    i1 = row // size2 % size1
    i0 = row // size2 // size1
    x += i0 * x0 + i1 * x1 + i2 * x2
    cos += i0 * cos0 + i1 * cos1 + i2 * cos2
    sin += i0 * sin0 + i1 * sin1 + i2 * sin2
    out += row * WIDTH

    pair = tl.arange(0, PAIRS)[None, :]
    mask = here & (pair < half)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + half
    a = tl.load(x + first, mask, 0.0).to(tl.float32)
    b = tl.load(x + second, mask, 0.0).to(tl.float32)
    rest = TURNED + tl.arange(0, REST)[None, :]
    there = here & (rest < WIDTH)
    if VARIANT != "none":
        squares = tl.sum(a * a + b * b, 1)
        if TURNED < WIDTH:
            passed = tl.load(x + rest, there, 0.0).to(tl.float32)
            squares += tl.sum(passed * passed, 1)
        mean = tl.div_rn(squares, tl.full((ROWS,), WIDTH, tl.float32))
        scale = tl.rsqrt(mean + tl.cast(eps, tl.float32))[:, None]
        a = _normed(a, scale, weight + first, pair < half, dtype, VARIANT)
        b = _normed(b, scale, weight + second, pair < half, dtype, VARIANT)
        if TURNED < WIDTH:
            passed = _normed(passed, scale, weight + rest, rest < WIDTH, dtype, VARIANT)
            tl.store(out + rest, passed.to(dtype), there)
    elif TURNED < WIDTH:
        tl.store(out + rest, tl.load(x + rest, there), there)
    if PER_PAIR:
        cos_a = _table(cos, pair, mask, dtype)
        sin_a = _table(sin, pair, mask, dtype)
        cos_b = cos_a
        sin_b = sin_a
    else:
        cos_a = _table(cos, first, mask, dtype)
        sin_a = _table(sin, first, mask, dtype)
        cos_b = _table(cos, second, mask, dtype)
        sin_b = _table(sin, second, mask, dtype)
    left = _times(a, cos_a, dtype, WIDE) - _times(b, sin_a, dtype, WIDE)
    right = _times(b, cos_b, dtype, WIDE) + _times(a, sin_b, dtype, WIDE)
    tl.store(out + first, left.to(dtype), mask)
    tl.store(out + second, right.to(dtype), mask)


_ROTATE_ROWS = triton.autotune(
    configs=one_if_interpreted(
        [
            triton.Config({"ROWS": rows}, num_warps=warps)
            for rows, warps in ((8, 4), (1, 1), (4, 2), (16, 4), (32, 8))
        ]
    ),
    key=["WIDTH", "TURNED", "INTERLEAVED", "PER_PAIR", "VARIANT", "PAIRED"],
    cache_results=True,
)(_rotate_rows)


class _Heads(NamedTuple):
    """A tensor to rotate, the weight of the norm before if there is one, and where it goes."""

    x: Tensor
    out: Tensor
    weight: Tensor | None = None


class _Norm(NamedTuple):
    """An RMSNorm of each head before it is rotated."""

    eps: float
    variant: str


class _Tables(NamedTuple):
    cos: Tensor
    sin: Tensor
    interleaved: bool
    per_pair: bool
    wide: bool = False


def _run(tables: _Tables, *heads: _Heads, norm: _Norm | None = None) -> None:
    """Rotate one tensor, or two in one launch."""
    if heads[0].x.shape[-1] != heads[-1].x.shape[-1]:
        for one in heads:
            _run(tables, one, norm=norm)
        return
    width = heads[0].x.shape[-1]
    turned = tables.cos.shape[-1] * (2 if tables.per_pair else 1)
    leads = [_lead(h.x, tables.cos, tables.sin) for h in heads]
    if any(a is not b for lead in leads for a, b in zip(lead.tables, leads[0].tables, strict=True)):
        for one in heads:  # whose tables were copied, to lie as this one's heads need them
            _run(tables, one, norm=norm)
        return

    def of_each(at: int) -> tuple[Any, ...]:
        one, lead = heads[at % len(heads)], leads[at % len(heads)]
        x = lead.tensors[0]
        return (
            x,
            x if one.weight is None else one.weight.contiguous(),
            one.out,
            one.x.numel() // width,
            *lead.sizes[1:],
            *(stride for strides in lead.strides for stride in strides),
        )

    def grid(meta: dict[str, Any]) -> tuple[Any]:
        return (sum(triton.cdiv(h.x.numel() // width, meta["ROWS"]) for h in heads),)

    wrap_triton(_ROTATE_ROWS)[grid](
        *of_each(0),
        *of_each(1),
        *leads[0].tables,
        0.0 if norm is None else norm.eps,
        WIDTH=width,
        TURNED=turned,
        PAIRS=triton.next_power_of_2(max(turned // 2, 1)),
        REST=triton.next_power_of_2(max(width - turned, 1)),
        INTERLEAVED=tables.interleaved,
        PER_PAIR=tables.per_pair,
        WIDE=tables.wide,
        VARIANT="none" if norm is None else norm.variant,
        PAIRED=len(heads) > 1,
    )


class _Lead(NamedTuple):
    """The dimensions before the last, and what x, cos and sin move by along each."""

    tensors: list[Tensor]
    sizes: list[Any]
    strides: list[list[Any]]

    @property
    def tables(self) -> list[Tensor]:
        return self.tensors[1:]


def _lead(x: Tensor, cos: Tensor, sin: Tensor) -> _Lead:
    """The leading dimensions of x, exactly :data:`DIMS` of them."""
    leading = x.shape[:-1]
    lead = _merged([t if _dense_rows(t) else t.contiguous() for t in (x, cos, sin)], leading)
    if len(lead.sizes) > DIMS:
        expanded = (t.expand(*leading, t.shape[-1]) for t in lead.tensors)
        lead = _merged([t.contiguous() for t in expanded], leading)
    missing = DIMS - len(lead.sizes)
    return _Lead(
        lead.tensors,
        [1] * missing + lead.sizes,
        [[0] * missing + strides for strides in lead.strides],
    )


def _merged(tensors: list[Tensor], leading: tuple[Any, ...]) -> _Lead:
    """Without dimensions of size 1, and with two as one where every tensor allows it."""
    all_strides = [t.expand(*leading, t.shape[-1]).stride() for t in tensors]
    merged = _Lead(tensors, [], [[], [], []])
    for d, size in enumerate(leading):
        if size == 1:
            continue
        steps = [strides[d] for strides in all_strides]
        pairs = list(zip(merged.strides, steps, strict=True))
        if merged.sizes and all(strides[-1] == step * size for strides, step in pairs):
            merged.sizes[-1] *= size
            for strides, step in pairs:
                strides[-1] = step
        else:
            merged.sizes.append(size)
            for strides, step in pairs:
                strides.append(step)
    return merged


def _dense_rows(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


@triton_op("compilepass_triton::rotate", mutates_args=())
def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    per_pair: bool = False,
    wide: bool = False,
) -> Tensor:
    out: Tensor = outputs("rotate", x, cos, sin, interleaved, per_pair, wide)
    _run(_Tables(cos, sin, interleaved, per_pair, wide), _Heads(x, out))
    return out


@triton_op("compilepass_triton::rotate_qk", mutates_args=())
def rotate_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    per_pair: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    args = (q, k, cos, sin, interleaved, per_pair, wide)
    out: tuple[Tensor, Tensor] = outputs("rotate_qk", *args)
    _run(_Tables(*args[2:]), _Heads(q, out[0]), _Heads(k, out[1]))
    return out


@triton_op("compilepass_triton::rotary_embedding", mutates_args=())
def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = outputs("rotary_embedding", q, k, cos, sin, interleaved)
    tables = _Tables(cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved, True)
    _run(tables, _Heads(q, out[0]), _Heads(k, out[1]))
    return out


@triton_op("compilepass_triton::qk_norm_rope", mutates_args=())
def qk_norm_rope(
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
    args = (q, k, q_weight, k_weight, cos, sin, eps, interleaved, variant)
    out: tuple[Tensor, Tensor] = outputs("qk_norm_rope", *args)
    heads = _Heads(q, out[0], q_weight), _Heads(k, out[1], k_weight)
    tables = _Tables(cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved, True)
    _run(tables, *heads, norm=_Norm(eps, variant))
    return out


@triton_op("compilepass_triton::rms_norm_rotate", mutates_args=())
def rms_norm_rotate(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    variant: str = "llama",
    interleaved: bool = False,
    per_pair: bool = False,
) -> Tensor:
    args = (x, weight, cos, sin, eps, variant, interleaved, per_pair)
    out: Tensor = outputs("rms_norm_rotate", *args)
    tables = _Tables(cos, sin, interleaved, per_pair)
    _run(tables, _Heads(x, out, weight), norm=_Norm(eps, variant))
    return out


@triton_op("compilepass_triton::rms_norm_rotate_qk", mutates_args=())
def rms_norm_rotate_qk(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    variant: str = "llama",
    interleaved: bool = False,
    per_pair: bool = False,
) -> tuple[Tensor, Tensor]:
    args = (q, k, q_weight, k_weight, cos, sin, eps, variant, interleaved, per_pair)
    out: tuple[Tensor, Tensor] = outputs("rms_norm_rotate_qk", *args)
    heads = _Heads(q, out[0], q_weight), _Heads(k, out[1], k_weight)
    _run(_Tables(cos, sin, interleaved, per_pair), *heads, norm=_Norm(eps, variant))
    return out
