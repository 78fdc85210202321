"""Llama decoder layers in int8 with dynamic activations, written with the layers that ship.

Every linear quantises its own input, so each norm and gate is followed by a quantisation, which
the passes fuse with it: ``norm + quant`` once, ``add + norm + quant`` for each further norm, and
``silu_and_mul + quant`` for each layer.

    compilepass run examples/int8_llama.py:block
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compilepass.layers import Int8Linear, RMSNorm, RotaryEmbedding, SiluAndMul

__all__ = ["Attention", "Decoder", "DecoderLayer", "FeedForward", "block"]


class Attention(nn.Module):
    """Causal multi-head attention over one sequence, ``[T, hidden]``."""

    def __init__(self, hidden: int, heads: int, max_position: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, hidden // heads
        self.qkv = _int8_linear(hidden, 3 * hidden, dtype)
        self.rotary = RotaryEmbedding(self.head_dim, max_position)
        self.out = _int8_linear(hidden, hidden, dtype)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 3, self.heads, self.head_dim).unbind(1)
        q, k = self.rotary(positions, q, k)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(attended.transpose(0, 1).flatten(-2))
        return out


class FeedForward(nn.Module):
    """SwiGLU, with gate and up projection in one matmul."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = _int8_linear(hidden, 2 * intermediate, dtype)
        self.gate = SiluAndMul()
        self.down = _int8_linear(intermediate, hidden, dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gate(self.gate_up(x)))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm that also adds the residual."""

    def __init__(
        self, hidden: int, intermediate: int, heads: int, max_position: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden, dtype=dtype)
        self.attention = Attention(hidden, heads, max_position, dtype)
        self.feed_forward_norm = RMSNorm(hidden, dtype=dtype)
        self.feed_forward = FeedForward(hidden, intermediate, dtype)

    def forward(
        self, positions: Tensor, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.attention_norm(x), x
        else:
            x, residual = self.attention_norm(x, residual)
        x, residual = self.feed_forward_norm(self.attention(positions, x), residual)
        return self.feed_forward(x), residual


class Decoder(nn.Module):
    """A stack of decoder layers over one sequence, without embedding and head."""

    def __init__(self, layers: list[DecoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0], device=x.device)
        residual = None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return x if residual is None else x + residual


def block(
    hidden: int = 2048,
    intermediate: int = 5632,
    heads: int = 16,
    tokens: int = 256,
    dtype: torch.dtype = torch.float32,
    layers: int = 1,
) -> tuple[Decoder, tuple[Tensor]]:
    """A model with random weights, always the same, and its input ``[tokens, hidden]``."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = Decoder(
            [DecoderLayer(hidden, intermediate, heads, tokens, dtype) for _ in range(layers)]
        )
        return model.eval().requires_grad_(False), (torch.randn(tokens, hidden, dtype=dtype),)


def _int8_linear(in_features: int, out_features: int, dtype: torch.dtype) -> Int8Linear:
    return Int8Linear.from_linear(nn.Linear(in_features, out_features, bias=False, dtype=dtype))
