"""Multi-head latent attention: keys and values are stored as one small latent for each token."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import OpValueError
from ..ops import PluggableLayer
from .norms import RMSNorm
from .rotary import RotaryEmbedding

__all__ = ["LatentCache", "MultiHeadLatentAttention", "causal_attention"]


@dataclass(frozen=True)
class LatentCache:
    """What attention needs of the tokens so far, ``S`` of them.

    latent: ``[B, S, kv_lora_rank]``, normed; keys and values of all heads are made from it.
    rope_key: ``[B, S, qk_rope_head_dim]``, rotated; the part of the keys that heads share.
    """

    latent: Tensor
    rope_key: Tensor

    def append(self, latent: Tensor, rope_key: Tensor) -> LatentCache:
        """A cache with further tokens at the end; this one is left as it is."""
        return LatentCache(
            torch.cat((self.latent, latent), dim=1), torch.cat((self.rope_key, rope_key), dim=1)
        )


@PluggableLayer.register("multi_head_latent_attention")
class MultiHeadLatentAttention(PluggableLayer):
    """Causal attention over a compressed key-value latent (DeepSeek-V2, arXiv:2405.04434, 2.1).

    ``layer(positions, x)`` attends within ``x``, a prefill. ``layer(positions, x, cache)`` attends
    to the cached tokens as well: ``T`` is 1 in decoding, and more in a chunked prefill.
    ``positions``: integers ``[B, T]`` below ``max_position``; ``x``: ``[B, T, hidden_size]``.
    Returns the output, ``[B, T, hidden_size]``, and the cache of all tokens so far. Tokens see
    those before them in the order of the rows, whatever their positions.

    The queries have a low-rank projection of their own with ``q_lora_rank``. Only the rope parts
    of queries and keys are rotated, by pairs of neighbours.

    Raises ``OpValueError`` for an input of another shape.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        max_position: int,
        q_lora_rank: int | None = None,
        rope_base: float = 10000.0,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.kv_lora_rank = kv_lora_rank
        self.nope_dim, self.rope_dim, self.v_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim

        def linear(in_features: int, out_features: int) -> nn.Linear:
            return nn.Linear(in_features, out_features, bias=False, dtype=dtype, device=device)

        q_width = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        if q_lora_rank is None:
            self.q: nn.Module = linear(hidden_size, q_width)
        else:
            low_rank = {
                "a": linear(hidden_size, q_lora_rank),
                "norm": RMSNorm(q_lora_rank, eps, dtype, device),
                "b": linear(q_lora_rank, q_width),
            }
            self.q = nn.Sequential(OrderedDict(low_rank))
        self.kv_a = linear(hidden_size, kv_lora_rank + qk_rope_head_dim)
        self.kv_norm = RMSNorm(kv_lora_rank, eps, dtype, device)
        self.kv_b = linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim))
        self.rotary = RotaryEmbedding(qk_rope_head_dim, max_position, rope_base, interleaved=True)
        self.out = linear(num_heads * v_head_dim, hidden_size)

    def forward(
        self, positions: Tensor, x: Tensor, cache: LatentCache | None = None
    ) -> tuple[Tensor, LatentCache]:
        self._check(positions, x)
        q_nope, q_rope = self._heads(self.q(x), self.nope_dim, self.rope_dim)
        latent, rope_key = torch.split(self.kv_a(x), [self.kv_lora_rank, self.rope_dim], dim=-1)
        latent = self.kv_norm(latent)
        q_rope, rope_key = self.rotary(positions, q_rope, rope_key.unsqueeze(-2))
        rope_key = rope_key.squeeze(-2)
        known = LatentCache(latent, rope_key) if cache is None else cache.append(latent, rope_key)

        attended = self.attend(q_nope, q_rope, known, cached=cache is not None)
        return self.out(attended.flatten(-2)), known

    def attend(self, q_nope: Tensor, q_rope: Tensor, known: LatentCache, *, cached: bool) -> Tensor:
        """Attention of the queries, ``[B, T, heads, D]``, to all tokens: ``[B, T, heads, v]``.

        ``cached`` says that ``known`` has tokens before those of the queries. The latents are
        expanded to keys and values here; a replacement may absorb ``kv_b`` in the queries instead.
        """
        k_nope, v = self._heads(self.kv_b(known.latent), self.nope_dim, self.v_dim)
        k_rope = known.rope_key.unsqueeze(-2).expand(-1, -1, self.num_heads, -1)
        q, k = torch.cat((q_nope, q_rope), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
        return causal_attention(q, k, v, cached=cached)

    def _heads(self, x: Tensor, *widths: int) -> tuple[Tensor, ...]:
        """``[..., heads * sum(widths)]`` as one ``[..., heads, width]`` for each width."""
        heads = x.view(*x.shape[:-1], self.num_heads, sum(widths))
        return torch.split(heads, list(widths), dim=-1)

    def _check(self, positions: Tensor, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[-1] != self.hidden_size or positions.shape != x.shape[:2]:
            raise OpValueError(
                f"MultiHeadLatentAttention got x of the shape {tuple(x.shape)} and positions of "
                f"the shape {tuple(positions.shape)}",
                why="It takes batches of tokens with one position for each token.",
                hint=f"Give x [B, T, {self.hidden_size}] and positions [B, T].",
            )


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cached: bool, scale: float | None = None
) -> Tensor:
    """Attention of the last ``T`` of ``S`` tokens, each to those before it and itself.

    ``q``: ``[B, T, heads, D]``, ``k`` and ``v``: ``[B, S, heads, D or V]``; result:
    ``[B, T, heads, V]``. Without ``cached``, ``T`` is ``S``. ``scale`` is ``D ** -0.5`` by default.
    """
    tokens, known = q.shape[1], k.shape[1]
    mask = None
    if cached and tokens > 1:  # is_causal would align the first rows, not the last ones
        mask = torch.ones(tokens, known, dtype=torch.bool, device=q.device).tril(known - tokens)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not cached, scale=scale)
    return attended.transpose(1, 2)
