"""Rotary embedding as models write it: a query ``x`` of hidden states, and tables ``c`` and ``s``.

``x`` is ``[rows, heads * head_dim]``; the tables are as wide as the spelling says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEADS, HEAD_DIM, ROTATED = 3, 16, 8


@dataclass(frozen=True)
class Rotary:
    """``flags`` are those of the one call of ``rotate``; ``tables`` the last size of the tables."""

    fn: Callable[..., Any]
    tables: int
    flags: tuple[bool, bool, bool]
    calls: int = 1


ROTARY: dict[str, Rotary] = {}


def rotary(
    tables: int = HEAD_DIM,
    interleaved: bool = False,
    per_pair: bool = False,
    wide: bool = False,
    calls: int = 1,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        assert fn.__name__ not in ROTARY
        ROTARY[fn.__name__] = Rotary(fn, tables, (interleaved, per_pair, wide), calls)
        return fn

    return enter


def inputs(s: Rotary, dtype: torch.dtype, rank: int) -> list[Tensor]:
    """Heads of rank 3 (``[tokens, heads, D]`` or transposed) or 4, with a batch before them."""
    rows = (5,) if rank == 3 else (2, 5)
    x = torch.randn(*rows, HEADS * HEAD_DIM)
    tensors = [t.to(dtype) for t in (x, *torch.randn(2, *rows, s.tables))]
    for tensor in tensors:
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    return tensors


def heads_first(x: Tensor) -> Tensor:
    """As Hugging Face's attention makes them: ``[..., heads, tokens, D]``, transposed."""
    return x.view(*x.shape[:-1], -1, HEAD_DIM).transpose(-3, -2)


def heads_last(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, HEAD_DIM)


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_every_two(x: Tensor) -> Tensor:
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def of_heads_first(table: Tensor) -> Tensor:
    return table.unsqueeze(-3)


def of_heads_last(table: Tensor) -> Tensor:
    return table.unsqueeze(-2)


# -- two halves ----------------------------------------------------------------------------------


@rotary()
def llama(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q, cos, sin = heads_first(x), of_heads_first(c), of_heads_first(s)
    return (q * cos) + (rotate_half(q) * sin)


@rotary()
def llama_heads_last(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q, cos, sin = heads_last(x), of_heads_last(c), of_heads_last(s)
    return sin * rotate_half(q) + cos * q


@rotary()
def llama_contiguous(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q, cos, sin = heads_first(x).contiguous(), of_heads_first(c), of_heads_first(s)
    return q * cos + rotate_half(q) * sin


@rotary()
def llama_one_batch_of_angles(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q = heads_first(x)
    cos, sin = c.view(-1, *c.shape[-2:])[:1], s.view(-1, *s.shape[-2:])[:1]
    out = q * cos.unsqueeze(1) + rotate_half(q) * sin.unsqueeze(1)
    return out.view(q.shape)


@rotary()
def llama_angles_of_positions(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q = heads_first(x)
    cos, sin = c.reshape(-1, HEAD_DIM)[: q.shape[-2]], s.reshape(-1, HEAD_DIM)[: q.shape[-2]]
    return q * cos + rotate_half(q) * sin


@rotary()
def llama_chunk(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q = heads_first(x)
    first, second = q.chunk(2, dim=-1)
    return q * of_heads_first(c) + torch.cat([second.neg(), first], -1) * of_heads_first(s)


@rotary()
def llama_split(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q = heads_last(x)
    first, second = torch.split(q, HEAD_DIM // 2, dim=-1)
    return torch.cat((-second, first), -1) * of_heads_last(s) + q * of_heads_last(c)


@rotary()
def llama_stacked_halves(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q = heads_last(x)
    first, second = q.unflatten(-1, (2, HEAD_DIM // 2)).unbind(-2)
    turned = torch.cat((-second, first), -1)
    return q * of_heads_last(c) + turned * of_heads_last(s)


@rotary(calls=2)
def llama_query_and_key(x: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    q, k = heads_first(x), heads_first(x[..., :HEAD_DIM])
    cos, sin = of_heads_first(c), of_heads_first(s)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


@rotary()
def llama_angles_of_frequencies(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    angles = torch.cat((c[..., : HEAD_DIM // 2], s[..., HEAD_DIM // 2 :]), -1).float()
    q, cos, sin = heads_first(x), angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return q * of_heads_first(cos) + rotate_half(q) * of_heads_first(sin)


@rotary()
def part_of_a_wider_projection(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q = heads_first(torch.cat((x, x), -1))[..., 1 : HEADS + 1, :, :]
    return q * of_heads_first(c) + rotate_half(q) * of_heads_first(s)


@rotary(HEAD_DIM // 2, per_pair=True)
def halves_of_half_tables(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q, cos, sin = heads_last(x), of_heads_last(c), of_heads_last(s)
    first, second = q.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@rotary(HEAD_DIM // 2, per_pair=True)
def halves_of_half_tables_heads_first(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q, cos, sin = heads_first(x), of_heads_first(c), of_heads_first(s)
    first, second = q[..., : HEAD_DIM // 2], q[..., HEAD_DIM // 2 :]
    return torch.cat((cos * first - sin * second, sin * first + cos * second), -1)


@rotary(HEAD_DIM // 2, per_pair=True, wide=True)
def halves_in_float(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    cos, sin = of_heads_last(c).float(), of_heads_last(s).float()
    first, second = heads_last(x).float().chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


# -- pairs of neighbours -------------------------------------------------------------------------


@rotary(HEAD_DIM // 2, interleaved=True)
def gptj(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q = heads_last(x)
    cos = torch.repeat_interleave(of_heads_last(c), 2, -1)
    sin = torch.repeat_interleave(of_heads_last(s), 2, -1)
    return (q * cos) + (rotate_every_two(q) * sin)


@rotary(interleaved=True, wide=True)
def cohere(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q = heads_first(x).float()
    return (q * of_heads_first(c) + rotate_every_two(q) * of_heads_first(s)).to(x.dtype)


@rotary(interleaved=True)
def neighbours_reshaped(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q = heads_first(x)
    first, second = q.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-second, first), -1).reshape(q.shape)
    return q * of_heads_first(c) + turned * of_heads_first(s)


@rotary(HEAD_DIM // 2, interleaved=True, per_pair=True)
def neighbours_of_half_tables(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q, cos, sin = heads_last(x), of_heads_last(c), of_heads_last(s)
    first, second = q[..., 0::2], q[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


@rotary(HEAD_DIM // 2, interleaved=True, per_pair=True)
def neighbours_selected(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q = heads_last(x).unflatten(-1, (-1, 2))
    cos, sin = of_heads_last(c), of_heads_last(s)
    first, second = q[..., 0], q[..., 1]
    out = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return out.flatten(-2)


# -- a part of each head -------------------------------------------------------------------------


def partial(q: Tensor, rotated: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat((rotated(q[..., :ROTATED]), q[..., ROTATED:]), dim=-1)


@rotary(ROTATED)
def gpt_neox(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    cos, sin = of_heads_first(c), of_heads_first(s)
    return partial(heads_first(x), lambda q: q * cos + rotate_half(q) * sin)


@rotary(ROTATED, interleaved=True)
def glm(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    cos, sin = of_heads_first(c), of_heads_first(s)
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    return partial(heads_first(x), lambda q: q * cos + rotate_every_two(q) * sin)


@rotary(ROTATED)
def partial_split(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    q, rest = heads_last(x).split([ROTATED, HEAD_DIM - ROTATED], -1)
    turned = q * of_heads_last(c) + rotate_half(q) * of_heads_last(s)
    return torch.cat((turned, rest), -1)


@rotary(ROTATED // 2, per_pair=True)
def partial_halves_of_half_tables(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    cos, sin = of_heads_last(c), of_heads_last(s)

    def rotated(q: Tensor) -> Tensor:
        first, second = q.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return partial(heads_last(x), rotated)


@rotary(ROTATED // 2, interleaved=True, per_pair=True)
def partial_neighbours_of_half_tables(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    cos, sin = of_heads_last(c), of_heads_last(s)

    def rotated(q: Tensor) -> Tensor:
        first, second = q[..., ::2], q[..., 1::2]
        parts = first * cos - second * sin, second * cos + first * sin
        return torch.stack(parts, -1).flatten(-2)

    return partial(heads_last(x), rotated)


@rotary(ROTATED)
def rest_before_the_rotated_part(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """The kernel rotates the first elements: these are a tensor of their own to it."""
    rest, q = heads_last(x).split([HEAD_DIM - ROTATED, ROTATED], -1)
    return torch.cat((rest, q * of_heads_last(c) + rotate_half(q) * of_heads_last(s)), -1)
