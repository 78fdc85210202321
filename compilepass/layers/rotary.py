"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import OpValueError, did_you_mean
from ..kernels import native
from ..ops import CustomOp
from .rotary_scaling import RotaryScaling

__all__ = ["MRotaryEmbedding", "QKNormRope", "RotaryEmbedding"]

# The weight with which each variant of the norm leaves the normed values as they are.
_NEUTRAL_WEIGHT = {"llama": 1.0, "torch": 1.0, "gemma": 0.0}


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
    are ``position * base ** (-2i / rotary_dim)``, computed in fp32, with the frequencies that
    ``scaling`` makes of these where one is given; the rotation is computed in the dtype of ``q``
    and ``k``.

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
        scaling: RotaryScaling | None = None,
        **op_options: bool,
    ) -> None:
        width = head_dim if rotary_dim is None else rotary_dim
        if width % 2 or not 0 < width <= head_dim:
            raise OpValueError(
                f"{type(self).__name__} cannot rotate {width} elements of a head of {head_dim}",
                why="It rotates pairs of a head's elements.",
                hint="Give an even rotary_dim of at most head_dim.",
            )
        super().__init__(**op_options)
        self.head_dim, self.interleaved, self.scaling = head_dim, interleaved, scaling
        frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
        if scaling is not None:
            frequencies = scaling.frequencies(frequencies, base)
        amplitude = 1.0 if scaling is None else scaling.amplitude
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos() * amplitude, persistent=False)
        self.register_buffer("sin", angles.sin() * amplitude, persistent=False)

    def forward_native(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._tables(positions, q, k)
        return native.rotary_embedding(q, k, cos, sin, self.interleaved)

    def forward_cpu(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._tables(positions, q, k)
        rotated: tuple[Tensor, Tensor] = torch.ops.compilepass.rotary_embedding(
            q, k, cos, sin, self.interleaved
        )
        return rotated

    forward_cuda = forward_cpu

    def _tables(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each token, ``[..., rotary_dim / 2]``; or the error for wrong inputs."""
        self._check(positions, q, k, tokens=positions.shape, expected="positions [...]")
        return self.cos[positions], self.sin[positions]

    def _check(
        self, positions: Tensor, q: Tensor, k: Tensor, *, tokens: Sequence[int], expected: str
    ) -> None:
        for name, x in (("q", q), ("k", k)):
            if x.dim() < 2 or x.shape[:-2] != tokens or x.shape[-1] != self.head_dim:
                raise OpValueError(
                    f"{type(self).__name__} got {name} of the shape {tuple(x.shape)} and positions "
                    f"of the shape {tuple(positions.shape)}",
                    why=f"Each position rotates the heads of one token, {self.head_dim} wide.",
                    hint=f"Give {expected} and {name} [..., heads, {self.head_dim}].",
                )

    def extra_repr(self) -> str:
        max_position, half = self.cos.shape
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        return (
            f"{self.head_dim}, max_position={max_position}, rotary_dim={2 * half}, "
            f"interleaved={self.interleaved}{scaling}"
        )


@CustomOp.register(
    "mrotary_embedding",
    dynamic_arg_dims={"positions": {1: "tokens"}, "q": {0: "tokens"}, "k": {0: "tokens"}},
)
class MRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of tokens with several positions: time, height, width (M-RoPE,
    arXiv:2409.12191).

    ``positions``: integers ``[len(sections), ...]``. A head's pairs are split between the
    positions: the first ``sections[0]`` pairs turn by the first one, and so on, as in Qwen2-VL.
    With ``sections_interleaved`` they take turns, as in Qwen3-VL: pair ``i`` turns by position
    ``i % len(sections)`` while that one has pairs left, and by the first one otherwise.

    Raises ``OpValueError`` for what :class:`RotaryEmbedding` does, and for sections that are not
    as many pairs as are rotated.
    """

    section: Tensor
    pair: Tensor

    def __init__(
        self,
        head_dim: int,
        max_position: int,
        sections: Sequence[int],
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        scaling: RotaryScaling | None = None,
        sections_interleaved: bool = False,
        **op_options: bool,
    ) -> None:
        super().__init__(
            head_dim, max_position, base, rotary_dim, interleaved, scaling, **op_options
        )
        pairs = self.cos.shape[1]
        if sum(sections) != pairs or not all(size > 0 for size in sections):
            raise OpValueError(
                f"MRotaryEmbedding got the sections {tuple(sections)} for {pairs} pairs",
                why="Each pair of a head's elements turns by one of a token's positions.",
                hint=f"Give a size for each position, {pairs} in total.",
            )
        self.sections, self.sections_interleaved = tuple(sections), sections_interleaved
        if sections_interleaved:
            count = len(self.sections)
            turns = ((i % count, i // count) for i in range(pairs))
            section = [at if nth < self.sections[at] else 0 for at, nth in turns]
        else:
            section = [at for at, size in enumerate(self.sections) for _ in range(size)]
        self.register_buffer("section", torch.tensor(section), persistent=False)
        self.register_buffer("pair", torch.arange(pairs), persistent=False)

    def _tables(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        count = len(self.sections)
        # without as many, no tokens fit
        tokens = positions.shape[1:] if positions.shape[:1] == (count,) else (-1,)
        expected = f"positions [{count}, ...]"
        self._check(positions, q, k, tokens=tokens, expected=expected)
        of_pair = positions.movedim(0, -1)[..., self.section]
        return self.cos[of_pair, self.pair], self.sin[of_pair, self.pair]

    def extra_repr(self) -> str:
        order = ", sections_interleaved=True" if self.sections_interleaved else ""
        return f"{super().extra_repr()}, sections={self.sections}{order}"


@CustomOp.register(
    "qk_norm_rope",
    dynamic_arg_dims={"positions": {0: "tokens"}, "q": {0: "tokens"}, "k": {0: "tokens"}},
)
class QKNormRope(RotaryEmbedding):
    """Norm each head of queries and keys, then rotate it by its position, in one kernel.

    Attention of Qwen3 (``variant="llama"``) and Gemma 3 (``"gemma"``): an RMS norm with a weight of
    ``[head_dim]`` for the queries and one for the keys, and :class:`RotaryEmbedding`, whose
    arguments this takes and whose calls it has.
    """

    def __init__(
        self,
        head_dim: int,
        max_position: int,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        scaling: RotaryScaling | None = None,
        eps: float = 1e-6,
        variant: str = "llama",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **op_options: bool,
    ) -> None:
        if variant not in _NEUTRAL_WEIGHT:
            raise OpValueError(
                f"QKNormRope got variant={variant!r}",
                why="The variant says where an RMS norm rounds and what it multiplies by.",
                hint=did_you_mean(str(variant), _NEUTRAL_WEIGHT),
            )
        super().__init__(
            head_dim, max_position, base, rotary_dim, interleaved, scaling, **op_options
        )
        self.eps, self.variant = eps, variant
        weight = torch.full((head_dim,), _NEUTRAL_WEIGHT[variant], dtype=dtype, device=device)
        self.q_weight, self.k_weight = nn.Parameter(weight), nn.Parameter(weight.clone())

    def forward_native(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._tables(positions, q, k)
        weights = self.q_weight, self.k_weight
        return native.qk_norm_rope(
            q, k, *weights, cos, sin, self.eps, self.interleaved, self.variant
        )

    def forward_cpu(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._tables(positions, q, k)
        weights = self.q_weight, self.k_weight
        rotated: tuple[Tensor, Tensor] = torch.ops.compilepass.qk_norm_rope(
            q, k, *weights, cos, sin, self.eps, self.interleaved, self.variant
        )
        return rotated

    forward_cuda = forward_cpu

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, eps={self.eps}, variant={self.variant!r}"
