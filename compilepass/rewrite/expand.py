"""Expand a call of a registered kernel into the terms of its native reference.

The native form is traced once per kernel, dtypes, ranks and which sizes are equal; every further
call copies the traced terms with its own sizes and numbers.
"""

from __future__ import annotations

from typing import Any

import sympy

from ..errors import PatternError
from ..kernels import find
from ..reporting import note
from .canonical import Operand
from .record import Decompositions
from .term import Size, Term
from .trace import TensorSpec, Traced, Variable, copy_terms, size_symbol, trace

__all__ = ["KernelExpander"]


class KernelExpander:
    """Traces kernels' native forms with ``decompositions`` and keeps the traces."""

    def __init__(self, decompositions: Decompositions) -> None:
        self._decompositions = decompositions
        self._traces: dict[Any, Traced | None] = {}

    def __call__(
        self,
        op: Any,
        params: list[tuple[str, Any]],
        operands: list[Operand],
        owners: tuple[Any, ...],
    ) -> tuple[list[Term], list[Term]] | None:
        """The output terms, and all terms made for them; ``None`` for an op without native form.

        ``params`` are the arguments of ``op`` that are no tensors.
        """
        kernel = find(op)
        if kernel is None:
            return None
        sizes: dict[Size, sympy.Symbol] = {}
        specs: dict[str, TensorSpec] = {}
        inputs: dict[str, Term] = {}
        for name, term, shape, _ in operands:
            if term is None or term.dtype is None or shape is None or name in specs:
                return None
            specs[name] = TensorSpec(tuple(_symbol(s, sizes) for s in shape), term.dtype)
            inputs[name] = term
        numbers = [k for k, v in params if isinstance(v, (float, Variable, sympy.Expr))]
        fixed = {k: v for k, v in params if k not in numbers}
        key = (op, tuple(specs.items()), tuple(numbers), tuple(fixed.items()))
        if key not in self._traces:
            hints = {symbol.name: _hint(size) for size, symbol in sizes.items()}
            self._traces[key] = self._trace(kernel.native, specs, numbers, fixed, hints, op)
        traced = self._traces[key]
        if traced is None:
            return None
        back = {symbol: size for size, symbol in sizes.items()}
        if any(g.xreplace(back) != sympy.true for g in traced.guards):
            return None
        values = {Variable(k): v for k, v in params if k in numbers}
        replaced = {traced.inputs[n]: t for n, t in inputs.items()}
        new = copy_terms(traced.terms, back, values, replaced=replaced, owners=owners)
        made = [new[t] for t in traced.terms if t not in replaced]
        return [new[t] for t in traced.outputs], made

    def _trace(
        self, native: Any, specs: Any, numbers: list[str], fixed: Any, hints: Any, op: Any
    ) -> Traced | None:
        try:
            return trace(
                native,
                specs,
                numbers,
                fixed,
                decompositions=self._decompositions,
                what=f"the native form of {op}",
                hints=hints,
            )
        except (PatternError, RuntimeError, TypeError) as error:
            note("rewrite", f"calls of {op} are not matched by rules: {error}")
            return None


def _symbol(size: Size, sizes: dict[Size, sympy.Symbol]) -> Size:
    if isinstance(size, int) and size in (0, 1):
        return size
    if size not in sizes:
        sizes[size] = size_symbol(str(len(sizes)))
    return sizes[size]


def _hint(size: Size) -> int:
    if isinstance(size, int):
        return size
    return int(size.xreplace({s: sympy.Integer(48) for s in size.free_symbols}))
