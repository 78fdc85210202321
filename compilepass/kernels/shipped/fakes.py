"""What the fakes of several families share."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["quantised", "shape"]


def shape(x: Tensor) -> tuple[int, ...]:
    """As it is printed in messages."""
    return tuple(x.shape)


def quantised(x: Tensor, sizes: list[int | torch.SymInt]) -> tuple[Tensor, Tensor]:
    """int8 of those sizes, and a scale for each of its rows."""
    return (
        x.new_empty(sizes, dtype=torch.int8),
        x.new_empty([*sizes[:-1], 1], dtype=torch.float32),
    )
