"""Build canonical terms: the table of equivalences, and the casts that operations do by themselves.

One :class:`Spelling` serves one graph. It notes what it ``made`` and which values an equivalence
``spelled`` otherwise, so that an explanation can name it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from .equivalences import EQUIVALENCES, Entry, possible
from .operations import PROMOTING, REDUCTIONS, is_kernel, op_name
from .term import Shape, Term

__all__ = ["Spelling"]


class Spelling:
    """Makes the terms of one graph; ``expands`` says that kernel calls stand for their native form.

    ``made`` are the terms made since the caller last replaced it.
    """

    def __init__(self, *, expands: bool) -> None:
        self._expands = expands
        self.made: list[Term] = []
        self.spelled: dict[Term, str] = {}  # values that an equivalence made, with its name

    def make(
        self,
        op: str,
        args: tuple[Term, ...],
        params: tuple[tuple[str, Any], ...] = (),
        *,
        like: Term,
        dtype: torch.dtype | None = None,
        shape: Shape | None = None,
        seen: tuple[Shape | None, ...] | None = None,
        absorb: tuple[Term, ...] = (),
    ) -> Term:
        """A term with the shape and dtype of ``like``, or others, for the use of equivalences.

        ``absorb`` names operations that are folded into the new one, so that a match of it is
        known to use them up.
        """
        owners = list(like.owners)
        owners += [o for t in absorb for o in t.owners if o not in owners]
        made = Term(
            op,
            args,
            params,
            shape=like.shape if shape is None else shape,
            dtype=dtype or like.dtype,
            seen=seen,
            owners=tuple(owners),
        )
        return self.canonical(made)

    def canonical(self, term: Term) -> Term:
        """What stands for ``term`` in the table, or ``term``."""
        for entry in EQUIVALENCES.get(term.op, ()):
            if not self._may_apply(entry, term.args):
                continue
            out = entry.rewrite(term, self)
            if out is not None and out is not term:
                self.spelled[out] = entry.name
                return out
        self.made.append(term)
        return term

    def _may_apply(self, entry: Entry, args: tuple[Term, ...]) -> bool:
        """Whether the operands are such as the entry is for, without reading them."""
        if entry.number and not any(a.is_const for a in args):
            return False
        return not entry.of or any(self.may_be(a, entry.of) for a in args)

    def may_be(self, term: Term, ops: frozenset[str]) -> bool:
        """Whether a value is computed by one of ``ops``, without reading it."""
        if term.is_read:
            return term.op in ops
        node: Any = term.node
        maker = node.args[0] if node.target is operator.getitem else node
        if self._expands and is_kernel(maker.target):
            return term.op in ops
        return not ops.isdisjoint(possible(op_name(node.target)))

    def with_casts(self, raw: Term) -> Term:
        """Write out the casts that an operation does by itself."""
        if raw.op in PROMOTING:
            return self._promoted(raw)
        return self._reduced_in_dtype(raw) if raw.op in REDUCTIONS else raw

    def _promoted(self, raw: Term) -> Term:
        """Write out the cast that type promotion does to a narrower operand."""
        if raw.dtype is None or not raw.dtype.is_floating_point:
            return raw
        args = tuple(
            a
            if a.is_const or a.dtype is None or a.dtype == raw.dtype or a.shape == ()
            else self._cast(a, raw.dtype, raw.owners)
            for a in raw.args
        )
        return raw if args == raw.args else _with(raw, args=args)

    def _reduced_in_dtype(self, raw: Term) -> Term:
        """Write out the cast of ``sum(x, dtype=…)`` and drop the argument."""
        params = tuple((k, v) for k, v in raw.params if k != "dtype")
        source = raw.args[0]
        if raw.dtype == source.dtype or raw.op.startswith("arg") or raw.dtype is None:
            return _with(raw, params=params)
        return _with(raw, args=(self._cast(source, raw.dtype, raw.owners),), params=params)

    def _cast(self, term: Term, dtype: torch.dtype, owners: tuple[Node, ...]) -> Term:
        made = Term(
            "cast", (term,), (("dtype", dtype),), shape=term.shape, dtype=dtype, owners=owners
        )
        self.made.append(made)
        return made


def _with(term: Term, *, args: tuple[Term, ...] | None = None, params: Any = None) -> Term:
    return Term(
        term.op,
        term.args if args is None else args,
        term.params if params is None else params,
        shape=term.shape,
        dtype=term.dtype,
        seen=term.seen,
        owners=term.owners,
    )
