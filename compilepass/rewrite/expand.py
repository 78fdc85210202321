"""Expand a call of a registered kernel into the terms of its native reference.

The native form is traced once per kernel, dtypes, ranks and which sizes are equal. From it the
terms of calls with the same sizes and numbers are made once, and copied for each of them.
"""

from __future__ import annotations

from typing import Any

import sympy

from ..errors import PatternError
from ..kernels import find
from ..reporting import note
from .arguments import Operand
from .canonical import Expansion
from .record import Decompositions
from .term import Size, Term
from .trace import TensorSpec, Traced, Variable, size_symbol, substituted, trace

__all__ = ["KernelExpander"]


class KernelExpander:
    """Traces kernels' native forms with ``decompositions`` and keeps the traces."""

    def __init__(self, decompositions: Decompositions) -> None:
        self._decompositions = decompositions
        self._traces: dict[Any, Traced | None] = {}
        self._forms: dict[Any, Traced | None] = {}  # with the sizes and numbers of calls

    def __call__(
        self,
        op: Any,
        params: list[tuple[str, Any]],
        operands: list[Operand],
        owners: tuple[Any, ...],
    ) -> Expansion | None:
        """The terms of a call; ``None`` for an op without native form.

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
        given = tuple(v for k, v in params if k in numbers)
        form = self._form(traced, tuple(sizes), dict(zip(numbers, given, strict=True)))
        if form is None:
            return None
        return _copied(form, inputs, owners)

    def _form(
        self, traced: Traced, sizes: tuple[Size, ...], numbers: dict[str, Any]
    ) -> Traced | None:
        """``traced`` with these sizes and numbers, unless it was traced for others."""
        key = (id(traced), sizes, tuple(numbers.items()))
        if key not in self._forms:
            back = {size_symbol(str(i)): size for i, size in enumerate(sizes)}
            if any(g.xreplace(back) != sympy.true for g in traced.guards):
                self._forms[key] = None
            else:
                values = {Variable(k): v for k, v in numbers.items()}
                new = substituted(traced.terms, back, values)
                self._forms[key] = Traced(
                    {n: new[t] for n, t in traced.inputs.items()},
                    tuple([new[t] for t in traced.outputs]),
                    tuple([new[t] for t in traced.terms]),
                    (),
                )
        return self._forms[key]

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


def _copied(form: Traced, inputs: dict[str, Term], owners: tuple[Any, ...]) -> Expansion:
    """Terms of one call's own on ``inputs``."""
    new = {form.inputs[name]: term for name, term in inputs.items()}
    made: list[Term] = []
    for term in form.terms:
        if term not in new:
            new[term] = Term(
                term.op,
                tuple([new[a] for a in term.args]),
                term.params,
                shape=term.shape,
                dtype=term.dtype,
                seen=term.seen,
                owners=owners,
            )
            made.append(new[term])
    given = list(inputs.values())
    kind = (id(form), *(given.index(term) for term in given))
    return Expansion([new[t] for t in form.outputs], made, kind)


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
