"""Rows in the order in which they lie in memory, for a replacement whose results are row-major.

Heads that a model has transposed, ``[B, S, heads, D]`` seen as ``[B, heads, S, D]``, are given to
the replacement as they lie there, and the way back is a view. Elementwise operations keep the
strides of their operands, so what a replacement stands for often has such strides, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch

from .layout import is_row_major
from .operations import kind_of
from .rule import Pattern
from .term import Term, same, size_of
from .trace import size_symbol

__all__ = ["MemoryOrder", "memory_order"]

_MOST = 4  # leading dimensions that are tried in any order

_ROWS = size_symbol("...")


@dataclass(frozen=True)
class MemoryOrder:
    """A permutation of leading dimensions."""

    leading: tuple[int, ...]

    def applied(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with its leading dimensions in this order, one dimension behind them.

        The first ones may be missing, as in a table that broadcasts; they are then of size 1.
        """
        missing = max(0, len(self.leading) + 1 - tensor.dim())
        for _ in range(missing):
            tensor = tensor.unsqueeze(0)
        return tensor.permute(*self.leading, *range(len(self.leading), tensor.dim()))

    def undone(self, tensor: torch.Tensor) -> torch.Tensor:
        back = sorted(range(len(self.leading)), key=self.leading.__getitem__)
        return tensor.permute(*back, *range(len(back), tensor.dim()))


def memory_order(
    pattern: Pattern, shapes: Mapping[str, tuple[Any, ...]], outs: Sequence[torch.Tensor | None]
) -> MemoryOrder | None:
    """The order of leading dimensions in which all of ``outs`` are row-major.

    ``None`` where they are so as they are, where there is no such order, and where it matters to
    the pattern which row is which. ``shapes`` are those in which the replacement sees its inputs.
    """
    given = [o for o in outs if o is not None]
    if all(map(is_row_major, given)) or not is_rowwise(pattern):
        return None
    rank = given[0].dim() - 1
    if not 1 < rank <= _MOST or any(o.dim() != rank + 1 for o in given):
        return None
    lead = [size_of(s) for s in given[0].shape[:-1]]
    for name, shape in shapes.items():
        if pattern.rule.is_open(name) and not pattern.rule.broadcasts(name):
            sizes = [size_of(s) for s in shape[:-1]]
            if len(sizes) != rank or not all(map(same, sizes, lead)):
                return None
    for leading in permutations(range(rank)):
        if all(is_row_major(o.permute(*leading, rank)) for o in given):
            return MemoryOrder(leading)
    return None


def is_rowwise(pattern: Pattern) -> bool:
    """Whether the pattern does the same to each row, and its tensors are rows of one dimension."""
    for name in pattern.rule.inputs:
        spec = pattern.rule.specs(pattern.dtype)[name]
        if pattern.rule.is_open(name) and len(spec.shape) != 2:
            return False
    rows = [t for t in pattern.traced.outputs if t.shape is not None]
    if any(len(t.shape or ()) != 2 or (t.shape or ())[0] != _ROWS for t in rows):
        return False
    return all(map(_keeps_rows_apart, pattern.operations))


def _keeps_rows_apart(term: Term) -> bool:
    kind = kind_of(term.op)
    if kind == "pointwise":
        return True
    if kind not in ("reduction", "along"):
        return False
    dims = term.param("dim")
    dims = dims if isinstance(dims, tuple) else (dims,)
    return all(s is None or all(s[d] != _ROWS for d in dims) for s in term.seen)
