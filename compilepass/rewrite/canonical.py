"""Turn graph nodes into canonical :class:`Term` s, in one pass, and keep them up to date.

Patterns and graphs go through the same code, so a spelling needs to be known once: positional or
keyword arguments and schema defaults, overloads, negative dimensions, views that keep the
row-major order, casts that do nothing, the table of :mod:`.equivalences`, and calls of registered
kernels, which are expanded to their native form (this is why one rule matches an op whether it is
enabled or not).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from .equivalences import EQUIVALENCES
from .operations import (
    OPERAND_SLOTS,
    PROMOTING,
    REDUCTIONS,
    VIEWS,
    is_number,
    keeps_order,
    normal_params,
    op_name,
    plain,
    schema_slots,
    widened,
)
from .record import Call
from .term import Shape, Term, const, size_of

__all__ = ["Canonical", "Expand", "Operand"]

Source = Node | Call


class Operand(NamedTuple):
    """A tensor operand of a call: its argument's name, term, shape as used, and node."""

    name: str
    term: Term | None
    shape: Shape | None
    node: Source | None


Expand = Callable[..., tuple[list[Term], list[Term]] | None]


class Canonical:
    """The terms of one graph, indexed by operation.

    ``expand`` turns a kernel call into the terms of its native outputs, or returns ``None``.
    """

    def __init__(self, expand: Expand | None = None) -> None:
        self._expand = expand
        self._terms: dict[Source, Term] = {}
        self._outputs: dict[Source, list[Term]] = {}  # of calls that return several tensors
        self._through: dict[Source, Source] = {}  # a transparent node and what it looks through to
        self.by_op: dict[str, dict[Term, None]] = defaultdict(dict)
        self._shapes: dict[Source, Shape | None] = {}
        self._made: list[Term] = []  # for the node at hand
        self._made_by: dict[Source, list[Term]] = {}
        self.spelled: dict[Term, str] = {}  # values that an equivalence made, with its name

    def _shape_of(self, node: Source) -> Shape | None:
        """The shape of a tensor node; a symbolic size is looked up once."""
        if node not in self._shapes:
            val = _tensor(node)
            sizes = tuple(val.shape) if val is not None else None
            if sizes is not None and any(type(s) is not int for s in sizes):
                sizes = tuple(size_of(s) for s in sizes)
            self._shapes[node] = sizes
        return self._shapes[node]

    # -- reading -------------------------------------------------------------------------------

    def term(self, node: Source) -> Term | None:
        return self._terms.get(node)

    def users(self, term: Term) -> Iterator[tuple[Term, Node]]:
        """The values computed from ``term``, each with the node that computes it."""
        todo = [term.node] if term.node is not None else list(term.owners)
        for node in todo:
            for maker in (node, *node.users):
                for made in self._made_by.get(maker, ()):
                    if term in made.args:
                        yield made, maker
                if maker in self._through and self._terms.get(maker) is term and maker not in todo:
                    todo.append(maker)

    def is_transparent(self, node: Source) -> bool:
        return node in self._through

    # -- building ------------------------------------------------------------------------------

    def add_graph(self, graph: Graph) -> None:
        for node in graph.nodes:
            self.add(node)

    def add_all(self, calls: Iterable[Source]) -> None:
        for call in calls:
            self.add(call)

    def discard(self, node: Source) -> None:
        """Forget an erased node, and the values that existed through it alone."""
        self._terms.pop(node, None)
        self._shapes.pop(node, None)
        self._outputs.pop(node, None)
        self._through.pop(node, None)
        for term in self._made_by.pop(node, ()):
            self.by_op[term.op].pop(term, None)

    def replace(self, old: Term, node: Node, made: Iterable[Node]) -> None:
        """Let ``old``, which users still refer to, be the value that ``node`` now computes.

        ``made`` are the nodes of the edit; terms among them that use the value are told as well.
        """
        new = self._terms[node]
        if new is old:
            return
        self.by_op[old.op].pop(old, None)
        self.by_op[new.op].pop(new, None)
        for slot in Term.__slots__:
            setattr(old, slot, getattr(new, slot))
        self.by_op[old.op][old] = None
        for maker in made:
            if self._terms.get(maker) is new:
                self._terms[maker] = old
            outputs = self._outputs.get(maker)
            if outputs is not None:
                self._outputs[maker] = [old if t is new else t for t in outputs]
        for maker in made:
            for term in self._made_by.get(maker, ()):
                if new in term.args:
                    term.args = tuple(old if a is new else a for a in term.args)

    def add(self, node: Source) -> None:
        if node.op != "call_function":
            if node.op in ("placeholder", "get_attr") and _tensor(node) is not None:
                self._leaf(node)
            return
        if node.target is operator.getitem:
            self._getitem(node)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            if _tensor(node) is not None:
                self._leaf(node)
            return
        self._call(node)

    def make(
        self,
        op: str,
        args: tuple[Term, ...],
        params: tuple[tuple[str, Any], ...] = (),
        *,
        like: Term,
        dtype: torch.dtype | None = None,
        seen: tuple[Shape | None, ...] | None = None,
        absorb: tuple[Term, ...] = (),
    ) -> Term:
        """A term with the shape and dtype of ``like``, for the use of equivalences.

        ``absorb`` names operations that are folded into the new one, so that a match of it is
        known to use them up.
        """
        owners = list(like.owners)
        owners += [o for t in absorb for o in t.owners if o not in owners]
        made = Term(
            op,
            args,
            params,
            shape=like.shape,
            dtype=dtype or like.dtype,
            seen=seen,
            owners=tuple(owners),
        )
        return self._canonical(made)

    def _canonical(self, term: Term) -> Term:
        for name, rewrite in EQUIVALENCES.get(term.op, ()):
            out = rewrite(term, self)
            if out is not None and out is not term:
                self.spelled[out] = name
                return out
        self._made.append(term)
        return term

    def _leaf(self, node: Source) -> None:
        val = _tensor(node)
        assert val is not None
        op = "input" if isinstance(node, Call) else "leaf"
        self._enter(node, Term(op, shape=self._shape_of(node), dtype=val.dtype))

    def _enter(self, node: Source, term: Term) -> None:
        """Make ``term`` the value of ``node`` and index the terms built on the way."""
        if term.node is None and not isinstance(node, Call):
            term.node = node
        if not term.owners and not isinstance(node, Call):
            term.owners = (node,)
        self._terms[node] = term
        if not self._made or self._made[-1] is not term:
            self._made.append(term)
        self._index(node)

    def _index(self, node: Source) -> None:
        """Enter the terms that were made for ``node``."""
        for term in self._made:
            self.by_op[term.op][term] = None
        self._made_by[node] = self._made
        self._made = []

    def _alias(self, node: Source, term: Term, through: Source) -> None:
        self._terms[node] = term
        self._through[node] = through
        self._made = []

    def _getitem(self, node: Source) -> None:
        source, index = node.args[0], node.args[1]
        assert isinstance(index, int)
        val = _tensor(node)
        if val is None or not isinstance(source, (Node, Call)):
            return
        outputs = self._outputs.get(source)
        if outputs is not None:  # an expanded kernel
            term = outputs[index]
            if term.node is None and not isinstance(node, Call):
                term.node = node
            self._terms[node] = term
            if term.node is not node and not isinstance(node, Call):
                self._through[node] = source
            return
        base = self._terms.get(source)
        if base is None:  # of a higher-order operator, say
            self._leaf(node)
            return
        raw = Term(
            "getitem",
            (base,),
            (("index", index),),
            shape=self._shape_of(node),
            dtype=val.dtype,
            owners=() if isinstance(node, Call) else (node,),
        )
        self._enter(node, self._canonical(raw))

    def _call(self, node: Source) -> None:
        op: Any = node.target
        operands, params = self._arguments(node)
        if self._expand is not None and op.namespace not in ("aten", "prims"):
            owners = () if isinstance(node, Call) else (node,)
            expanded = self._expand(op, params, operands, owners)
            if expanded is not None:
                outs, self._made = expanded
                self._enter_expansion(node, outs)
                return
        val = node.meta.get("val")
        out = val if isinstance(val, torch.Tensor) else None
        if any(o.term is None for o in operands):
            if out is not None:
                self._leaf(node)
            return
        name = op_name(op)
        args = tuple(o.term for o in operands if o.term is not None)
        seen = tuple(o.shape for o in operands)
        if out is not None and self._looks_through(node, name, operands, params, out):
            return
        shape = self._shape_of(node) if out is not None else None
        raw = Term(
            name,
            args,
            normal_params(name, params, seen),
            shape=shape,
            dtype=out.dtype if out is not None else None,
            seen=seen,
            owners=() if isinstance(node, Call) else (node,),
        )
        if name in PROMOTING and out is not None:
            raw = self._promote(raw)
        if name in REDUCTIONS and out is not None:
            raw = self._reduce_in_dtype(raw)
        term = self._canonical(raw)
        if term.node is not None or any(term is a for a in args):  # it is a value that exists
            source = next(o.node for o in operands if o.term is term)
            assert source is not None
            self._alias(node, term, source)
            return
        self._enter(node, term)

    def _enter_expansion(self, node: Source, outs: list[Term]) -> None:
        if isinstance(node.meta.get("val"), torch.Tensor):
            if outs[0].node is None and not isinstance(node, Call):
                outs[0].node = node
            self._terms[node] = outs[0]
        else:
            self._outputs[node] = outs
            self._terms[node] = Term("kernel")
        self._index(node)

    def _arguments(self, node: Source) -> tuple[list[Operand], list[tuple[str, Any]]]:
        """The tensor operands, and the other arguments by name, defaults filled in."""
        operands: list[Operand] = []
        params: list[tuple[str, Any]] = []
        given, named = node.args, node.kwargs
        for i, (name, default) in enumerate(schema_slots(node.target)):
            value: Any = given[i] if i < len(given) else named.get(name, default)
            if isinstance(value, (Node, Call)):
                shape = self._shape_of(value)
                if shape is not None or not is_number(value.meta.get("val")):
                    operands.append(Operand(name, self._terms.get(value), shape, value))
                    continue
            elif isinstance(value, (list, tuple)) and any(
                isinstance(v, (Node, Call)) and self._shape_of(v) is not None for v in value
            ):
                for v in value:
                    if v is not None:
                        shape = self._shape_of(v)
                        operands.append(Operand(name, self._terms.get(v), shape, v))
                params.append((name, tuple(v is not None for v in value)))
                continue
            value = plain(value)
            if name in OPERAND_SLOTS and is_number(value):
                operands.append(Operand(name, const(value), None, None))
            else:
                params.append((name, value))
        return operands, params

    def _looks_through(
        self,
        node: Source,
        name: str,
        operands: list[Operand],
        params: list[tuple[str, Any]],
        out: torch.Tensor,
    ) -> bool:
        """Make a node that changes no element the same value as its operand."""
        if not operands:
            return False
        _, term, seen, source = operands[0]
        if term is None or seen is None or source is None:
            return False
        if (name in VIEWS and out.dtype == term.dtype) or (
            name in ("expand", "permute", "slice", "transpose", "t")
            and (keeps_order(name, seen, self._shape_of(node) or (), dict(params)))
        ):
            self._alias(node, term, source)
            return True
        if name != "cast":
            return False
        if out.dtype == term.dtype:
            self._alias(node, term, source)
            return True
        inner = term
        if inner.op == "cast" and inner.dtype in widened(inner.args[0].dtype):
            origin = inner.args[0]
            if origin.dtype == out.dtype:
                self._alias(node, origin, source)
                return True
        return False

    def _promote(self, raw: Term) -> Term:
        """Write out the cast that type promotion does to a narrower operand."""
        if raw.dtype is None or not raw.dtype.is_floating_point:
            return raw
        args = tuple(
            a
            if a.is_const or a.dtype is None or a.dtype == raw.dtype or a.shape == ()
            else self._virtual_cast(a, raw.dtype, raw.owners)
            for a in raw.args
        )
        return raw if args == raw.args else _with(raw, args=args)

    def _reduce_in_dtype(self, raw: Term) -> Term:
        """Write out the cast of ``sum(x, dtype=…)`` and drop the argument."""
        params = tuple((k, v) for k, v in raw.params if k != "dtype")
        source = raw.args[0]
        if raw.dtype == source.dtype or raw.op.startswith("arg") or raw.dtype is None:
            return _with(raw, params=params)
        return _with(raw, args=(self._virtual_cast(source, raw.dtype, raw.owners),), params=params)

    def _virtual_cast(self, term: Term, dtype: torch.dtype, owners: tuple[Node, ...]) -> Term:
        made = Term(
            "cast", (term,), (("dtype", dtype),), shape=term.shape, dtype=dtype, owners=owners
        )
        self._made.append(made)
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


def _tensor(node: Source) -> torch.Tensor | None:
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None
