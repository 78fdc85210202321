"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OpValueError
from ..kernels import native
from ..ops import CustomOp

__all__ = ["RotaryEmbedding"]


@CustomOp.register(
    "rotary_embedding",
    dynamic_arg_dims={"positions": {0: "tokens"}, "q": {0: "tokens"}, "k": {0: "tokens"}},
)
class RotaryEmbedding(CustomOp):
    """Rotate queries and keys by their position (RoPE, arXiv:2104.09864).

    ``positions``: integers ``[...]`` below ``max_position``; ``q`` and ``k``:
    ``[..., heads, head_dim]``, with as many heads as each has; returns both rotated. The first
    ``rotary_dim`` elements of a head (all by default) are rotated and the rest is left as it is.
    ``interleaved`` pairs neighbours, as in GPT-J, instead of the two halves, as in Llama. Angles
    are ``position * base ** (-2i / rotary_dim)``, computed in fp32; the rotation is computed in
    the dtype of ``q`` and ``k``.

    Raises ``OpValueError`` for an odd or too large ``rotary_dim``, for heads of another width and
    for tensors that do not have one position for each token.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_position: int,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        **op_options: bool,
    ) -> None:
        width = head_dim if rotary_dim is None else rotary_dim
        if width % 2 or not 0 < width <= head_dim:
            raise OpValueError(
                f"RotaryEmbedding cannot rotate {width} elements of a head of {head_dim}",
                why="It rotates pairs of a head's elements.",
                hint="Give an even rotary_dim of at most head_dim.",
            )
        super().__init__(**op_options)
        self.head_dim, self.interleaved = head_dim, interleaved
        frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward_native(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        self._check(positions, q, k)
        cos, sin = self.cos[positions], self.sin[positions]
        return native.rotary_embedding(q, k, cos, sin, self.interleaved)

    def forward_cpu(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        self._check(positions, q, k)
        cos, sin = self.cos[positions], self.sin[positions]
        rotated: tuple[Tensor, Tensor] = torch.ops.compilepass.rotary_embedding(
            q, k, cos, sin, self.interleaved
        )
        return rotated

    forward_cuda = forward_cpu

    def _check(self, positions: Tensor, q: Tensor, k: Tensor) -> None:
        for name, x in (("q", q), ("k", k)):
            if x.dim() < 2 or x.shape[:-2] != positions.shape or x.shape[-1] != self.head_dim:
                raise OpValueError(
                    f"RotaryEmbedding got {name} of the shape {tuple(x.shape)} and positions of "
                    f"the shape {tuple(positions.shape)}",
                    why=f"Each position rotates the heads of one token, {self.head_dim} wide.",
                    hint=f"Give positions [...] and {name} [..., heads, {self.head_dim}].",
                )

    def extra_repr(self) -> str:
        max_position, half = self.cos.shape
        return (
            f"{self.head_dim}, max_position={max_position}, rotary_dim={2 * half}, "
            f"interleaved={self.interleaved}"
        )
