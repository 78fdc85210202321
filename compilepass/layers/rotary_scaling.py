"""Frequencies of rotary embedding for contexts longer than a model was first trained for.

Each scaling changes the frequencies ``base ** (-2i / width)`` of the pairs, and may change how long
the rotated vectors are. The formulas are those of Hugging Face's ``modeling_rope_utils``, by whose
names of parameters they go.

    RotaryEmbedding(128, 131072, base=500000.0, scaling=Llama3Scaling())
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Llama3Scaling", "RotaryScaling", "YarnScaling"]


class RotaryScaling(Protocol):
    """What a rotary embedding asks of a scaling."""

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        """The frequencies in place of the ``plain`` ones, ``base ** (-i / len(plain))``, fp32."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1 (arXiv:2407.21783; ``apply_scaling`` of its reference code): low frequencies are
    divided by ``factor``, high ones are kept, and those between are interpolated.

    A frequency is low where its wave is longer than ``original_max_position / low_freq_factor``,
    and high where it is shorter than ``original_max_position / high_freq_factor``.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @property
    def amplitude(self) -> float:
        return 1.0

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        waves = self.original_max_position * plain / (2 * math.pi)  # in the original context
        kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _between(plain / self.factor, plain, kept.clamp(0, 1))


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): pairs that turn often in the original context are kept, those that
    turn rarely are slowed down by ``factor``, with a linear ramp between them.

    A pair turns often from ``beta_fast`` turns on, and rarely up to ``beta_slow``. ``truncate``
    rounds the ends of the ramp to whole pairs. cos and sin are multiplied by ``attention_factor``;
    without one it is ``0.1 * ln(factor) + 1``, or, with both ``mscale`` and ``mscale_all_dim``
    (DeepSeek), the ratio of what each of them gives as a factor of the logarithm.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._logarithmic(self.mscale) / self._logarithmic(self.mscale_all_dim)
        return self._logarithmic(1.0)

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        pairs = plain.numel()
        first, last = (
            self._pair_that_turns(times, pairs, base) for times in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0.0), min(last, 2 * pairs - 1.0)
        slowed = (torch.arange(pairs) - first) / max(last - first, 1e-3)
        return _between(plain, plain / self.factor, slowed.clamp(0, 1))

    def _logarithmic(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _pair_that_turns(self, times: float, pairs: int, base: float) -> float:
        """The (fractional) index of the pair that turns so often in the original context."""
        wave = self.original_max_position / (times * 2 * math.pi)
        return pairs * math.log(wave) / math.log(base)


def _between(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    return start * (1 - share) + end * share
