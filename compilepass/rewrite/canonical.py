"""Turn graph nodes into canonical :class:`Term` s, on demand, and keep them up to date.

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
from torch.utils._pytree import tree_flatten

from .arguments import Source, arguments
from .equivalences import EQUIVALENCES, Entry, made_at, makers_of, may_vanish
from .index import CallIndex, dtypes_of
from .operations import (
    LOOKED_THROUGH,
    VIEWS,
    is_kernel,
    keeps_order,
    normal_params,
    op_name,
    widened,
)
from .record import Call
from .spelling import Spelling
from .term import Shape, Term, size_of

__all__ = ["Canonical", "Expand", "Expansion"]

_CAST = frozenset(["cast"])
_INT = frozenset([int])
_DEEP = 60  # levels of reading, each of a few calls, from which on it goes from the operands up


class Expansion(NamedTuple):
    """A kernel call as its native form: the outputs, all that was ``made`` for them, in order.

    Calls of one ``kind`` have the same terms on operands of the same layout.
    """

    outputs: list[Term]
    made: list[Term]
    kind: Any


Expand = Callable[..., Expansion | None]


class Canonical:
    """The terms of one graph, or of one recorded function, indexed by operation.

    A term is read when it is first looked at. ``expand`` turns a kernel call into the terms of its
    native outputs, or returns ``None``.
    """

    def __init__(self, graph: Graph | None = None, expand: Expand | None = None) -> None:
        self.calls = CallIndex(graph or Graph())
        self._expand = expand
        self._terms: dict[Source, Term | None] = {}
        self._outputs: dict[Source, list[Term]] = {}  # of kernels that return several tensors
        self._through: dict[Source, Source] = {}  # a transparent node and what it looks through to
        self._by_op: dict[str, dict[Term, None]] = defaultdict(dict)  # of the terms that were read
        self._shapes: dict[Source, Shape | None] = {}
        self._made_by: dict[Source, list[Term]] = {}
        self._used_by: dict[Term, dict[Term, Source]] = defaultdict(dict)
        self._expansions: dict[Source, Any] = {}  # their kinds
        self._kinds: dict[Source, Any] = {}  # of kernel calls
        self._inside: dict[Any, frozenset[str]] = {}  # operations of the native forms, by call
        self._counts: dict[str, int] = {}
        self._spellings_read: set[Entry] = set()
        self._depth = 0
        self._spelling = Spelling(expands=expand is not None)

    @property
    def spelled(self) -> dict[Term, str]:
        """The values that an equivalence made, with its name."""
        return self._spelling.spelled

    # -- asking --------------------------------------------------------------------------------

    def term(self, node: Source) -> Term | None:
        """The value of ``node``; ``None`` for what is no tensor."""
        if node in self._terms:
            return self._terms[node]
        self._depth += 1
        try:
            if self._depth > _DEEP:
                self._read_below(node)
            term = self._terms[node] = self._look(node)
        finally:
            self._depth -= 1
        return term

    def values(self, op: str) -> list[Term]:
        """All values that ``op`` computes, in the order of the graph."""
        for node in self._kernels_with(op):  # one read shows whether others of its kind have it
            self._read_all(node)
        for node in self.calls.makers(op):
            self._read_all(node)
        return sorted(self._by_op.get(op, ()), key=lambda term: term.owners[0])

    def each_value(self, op: str) -> Iterator[Term]:
        """The same one by one, each read when it is its turn, for who changes the graph meanwhile.

        What is new in the graph is not among them.
        """
        known = [(term, term.node) for term in self._by_op.get(op, ())]
        kernels = self.calls.kernels() if self._expand is not None else []
        seen: set[Term] = set()
        for node in sorted({*kernels, *self.calls.makers(op)}):
            if node._erased or (is_kernel(node.target) and not self._may_hold(node, op)):
                continue
            self._read_all(node)
            for term in self._made_by.get(node, ()):
                if term.op == op and term not in seen:
                    seen.add(term)
                    yield term
        for term, held_by in known:
            if term not in seen and term.node is held_by and term.is_there:
                yield term

    def count(self, op: str) -> int:
        """At most how many values ``op`` computes, kernel calls taken to compute one each."""
        if op not in self._counts:
            kernels = sum(1 for _ in self._kernels_with(op))
            self._counts[op] = len(self.calls.makers(op)) + kernels
        return self._counts[op]

    def users(self, term: Term, op: str = "") -> list[tuple[Term, Source]]:
        """The values (by ``op``) computed from ``term``, each with the node that computes it.

        Those that an equivalence makes further on are among them after :meth:`read_spellings`.
        """
        todo = list(dict.fromkeys((term.node or term.owners[0], *term.owners)))
        for node in todo:
            for user in (node, *node.users):
                if op and not self._may_compute(user, op):
                    continue
                result = self._read_all(user)
                if result is term and user in self._through and user not in todo:
                    todo.append(user)
        used = self._used_by.get(term, {})
        return [
            (t, maker)
            for t, maker in used.items()
            if (not op or t.op == op) and term in t.args and self._is_there(t)
        ]

    def read_spellings(self, op: str) -> None:
        """Read the nodes that compute an ``op`` together with some before them."""
        for entry in makers_of(op):
            if entry.of and entry not in self._spellings_read:
                self._spellings_read.add(entry)
                for node in self.calls.users_of(entry, frozenset([op])):
                    self._read_all(node)

    def _is_there(self, term: Term) -> bool:
        return term in self._by_op[term.op]

    def place_in_kernel(self, term: Term) -> Any:
        """What is equal for the same values inside of equal kernel calls; ``None`` elsewhere.

        Calls are equal whose operands are computed by the same operations.
        """
        node = term.owners[0] if term.owners else None
        if node is None or node not in self._expansions:
            return None
        for i, made in enumerate(self._made_by.get(node, ())):
            if made is term:
                operands = [self.term(n) for n in node.all_input_nodes]
                return self._expansions[node], i, tuple([t and t.op for t in operands])
        return None

    def known(self, node: Node) -> Term | None:
        """The value of ``node``, if it was asked for before."""
        return self._terms.get(node)

    def is_transparent(self, node: Source) -> bool:
        self.term(node)
        return node in self._through

    def _read_all(self, node: Source) -> Term | None:
        term = self.term(node)
        if term is not None:
            _ = term.op
        return term

    def _may_compute(self, node: Node, op: str) -> bool:
        """Whether ``op`` may be among what ``node`` computes, or ``node`` may change nothing."""
        if node.op != "call_function":
            return False
        if self._expand is not None and is_kernel(node.target):
            return self._may_hold(node, op)
        name = op_name(node.target)
        passes_on = name in LOOKED_THROUGH or name == "getitem" or may_vanish(name)
        return passes_on or op in made_at(name)

    def _kernels_with(self, op: str) -> Iterator[Node]:
        """The kernel calls whose native form has an ``op``, as far as is known."""
        if self._expand is not None:
            for node in self.calls.kernels():
                if self._may_hold(node, op):
                    yield node

    def _may_hold(self, node: Node, op: str) -> bool:
        """Whether the native form of a kernel call may have an ``op``."""
        kind = self._kinds.get(node)
        if kind is None:
            kind = self._kinds[node] = self._kind_of_call(node)
        return op in self._inside.get(kind, (op,))

    def _kind_of_call(self, node: Source) -> Any:
        """What tells calls apart whose native forms may have different operations."""

        def kind(value: Any) -> Any:
            if isinstance(value, (Node, Call)):
                val: Any = value.meta.get("val")
                is_tensor = isinstance(val, torch.Tensor)
                return (val.dtype, self.shape_of(value)) if is_tensor else type(val)
            if isinstance(value, (list, tuple)):
                return tuple(map(kind, value))
            return type(value), value

        named = tuple([(k, kind(v)) for k, v in node.kwargs.items()])
        return node.target, kind(node.args), named

    # -- keeping up with the graph ---------------------------------------------------------------

    def add(self, node: Node) -> None:
        """Take note of a new node; what it computes is read when it is asked for."""
        self.calls.dtypes |= dtypes_of((node,))
        self._counts.clear()
        self._spellings_read.clear()

    def discard(self, node: Node) -> None:
        """Forget an erased node, and the values that existed through it alone."""
        for known in (
            self._terms,
            self._shapes,
            self._outputs,
            self._through,
            self._kinds,
            self._expansions,
        ):
            known.pop(node, None)
        for term in self._made_by.pop(node, ()):
            self._by_op[term.op].pop(term, None)

    def replace(self, old: Term, node: Node, made: Iterable[Node]) -> None:
        """Let ``old``, which users still refer to, be the value that ``node`` now computes.

        ``made`` are the nodes of the edit; terms among them that use the value are told as well.
        """
        new = self.term(node)
        if new is old or new is None:
            return
        self._by_op[old.op].pop(old, None)
        if new.is_read:
            self._by_op[new.op].pop(new, None)
            old.become(new)
            old.node = new.node
            self._by_op[old.op][old] = None
        else:
            old.forget(new.node, self)
        for maker in made:
            if self._terms.get(maker) is new:
                self._terms[maker] = old
            self._swap(new, old, self._outputs.get(maker, []))
            self._swap(new, old, self._made_by.get(maker, []))

    def _swap(self, new: Term, old: Term, terms: list[Term]) -> None:
        """Put ``old`` where ``new`` is among ``terms`` and their operands."""
        for i, term in enumerate(terms):
            if term is new:
                terms[i] = old
            elif new in term.args:
                term.args = tuple([old if a is new else a for a in term.args])
                if new in self._used_by:
                    self._used_by[old][term] = self._used_by[new][term]

    # -- reading a node --------------------------------------------------------------------------

    def _look(self, node: Source) -> Term | None:
        """The value of ``node``, unread where it cannot be one that exists already."""
        val: Any = node.meta.get("val")
        target = node.target
        tensor = isinstance(val, torch.Tensor)
        if not tensor and not isinstance(val, (tuple, list)):
            return None
        dtype = val.dtype if tensor else None
        if node.op != "call_function":
            op = "input" if isinstance(node, Call) else "leaf"
            return self._leaf(node, op)
        if target is operator.getitem:
            twin = self._twin(node)
            if twin is not None:
                self._through[node] = twin
                return self.term(twin)
        elif isinstance(target, torch._ops.OpOverload) and tensor and not is_kernel(target):
            seen_through = self._transparent(node, op_name(target), val)
            if seen_through is not None:
                self._through[node], term = seen_through
                return term
            if self._may_be_an_operand(node, op_name(target)):
                return self._operand_or_new(node)
        return Term.unread(node, dtype, self)

    def fill(self, term: Term) -> None:
        """Read an unread term (:class:`.term.Reader`)."""
        node: Any = term.node
        outer, self._spelling.made = self._spelling.made, []
        self._depth += 1
        try:
            if self._depth > _DEEP:
                self._read_below(node)
            made = self._read(node)
            term.become(made)
            self._enter(node, term, made)
            if node in self._outputs:  # the values that are taken from it are those made inside
                for user in node.users:
                    self._read_all(user)
        finally:
            self._depth -= 1
            self._spelling.made = outer

    def shape_of(self, node: Source) -> Shape | None:
        """The shape of a tensor node; a symbolic size is looked up once."""
        if node not in self._shapes:
            val = node.meta.get("val")
            sizes = tuple(val.shape) if isinstance(val, torch.Tensor) else None
            if sizes is not None and not _INT.issuperset(map(type, sizes)):
                sizes = tuple([size_of(s) for s in sizes])
            self._shapes[node] = sizes
        return self._shapes[node]

    def _read_below(self, node: Source) -> None:
        """Read all that ``node`` is computed from, operands first: graphs are deep."""
        depth, self._depth = self._depth, 0
        todo = list(_sources(node))
        while todo:
            last = todo[-1]
            missing = [n for n in _sources(last) if n not in self._terms]
            if missing and last not in self._terms:
                todo += missing
                continue
            todo.pop()
            self._read_all(last)
        self._depth = depth

    def _operand_or_new(self, node: Source) -> Term:
        """The value of a node that may do nothing to one of its operands."""
        outer, self._spelling.made = self._spelling.made, []
        try:
            made = self._read(node)
            for source in _sources(node):
                if self._terms.get(source) is made:
                    self._through[node] = source
                    return made
            if not isinstance(node, Call):
                made.node = node
            self._enter(node, made, made)
            return made
        finally:
            self._spelling.made = outer

    def _enter(self, node: Source, term: Term, made: Term) -> None:
        """Index ``term``, which says what was ``made`` for ``node``, and those made on the way."""
        source: Any = node.args[0] if node.target is operator.getitem else None
        if source in self._outputs:  # it was made for the kernel that returns it
            self._by_op[made.op].pop(made, None)
            self._swap(made, term, self._outputs[source])
            self._swap(made, term, self._made_by[source])
        else:
            if made is not term:
                self._swap(made, term, self._spelling.made)
            if not self._spelling.made or self._spelling.made[-1] is not term:
                self._spelling.made.append(term)
        if made in self.spelled:
            self.spelled[term] = self.spelled[made]
        if isinstance(node, Call):
            term.node = None
        elif not term.owners:
            term.owners = (node,)
        for each in (*self._spelling.made, term):
            self._by_op[each.op][each] = None
            for arg in each.args:
                self._used_by[arg][each] = node
        self._made_by[node] = self._spelling.made

    def _read(self, node: Source) -> Term:
        if node.target is operator.getitem:
            return self._getitem(node)
        if not isinstance(node.target, torch._ops.OpOverload) or getattr(node, "_erased", False):
            return self._leaf(node, "leaf")
        return self._call(node)

    def _leaf(self, node: Source, op: str) -> Term:
        val = node.meta["val"]
        dtype = val.dtype if isinstance(val, torch.Tensor) else None
        term = Term(op, shape=self.shape_of(node), dtype=dtype)
        if not isinstance(node, Call):
            term.node, term.owners = node, (node,)
        return term

    def _may_be_an_operand(self, node: Source, name: str) -> bool:
        """Whether the table may find that a node does nothing, such as ``x * 1``."""
        for entry in EQUIVALENCES.get(name, ()):
            if entry.may_vanish:
                if entry.number and not any(type(a) in (int, float) for a in node.args):
                    continue
                if not entry.of:
                    return True
                terms = [self.term(n) for n in _sources(node)]
                if any(t is not None and self._spelling.may_be(t, entry.of) for t in terms):
                    return True
        return False

    def _twin(self, node: Source) -> Source | None:
        """An earlier node that takes the same output of the same call."""
        source, index = node.args[0], node.args[1]
        if isinstance(source, Node):
            for user in source.users:
                if user is not node and user in self._terms and user.args[1:] == (index,):
                    return user if user.target is operator.getitem else None
        return None

    def _getitem(self, node: Source) -> Term:
        source: Any = node.args[0]
        index: Any = node.args[1]
        base = self._read_all(source) if isinstance(source, (Node, Call)) else None
        if source in self._outputs:
            made: Term = self._outputs[source][index]
            return made
        if base is None or not isinstance(source.target, torch._ops.OpOverload):
            return self._leaf(node, "leaf")  # of a higher-order operator, say
        raw = Term(
            "getitem",
            (base,),
            (("index", index),),
            shape=self.shape_of(node),
            dtype=node.meta["val"].dtype,
            owners=() if isinstance(node, Call) else (node,),
        )
        return self._spelling.canonical(raw)

    def _call(self, node: Source) -> Term:
        op: Any = node.target
        operands, params = arguments(node, self)
        owners = () if isinstance(node, Call) else (node,)
        out: Any = node.meta.get("val")
        tensor = isinstance(out, torch.Tensor)
        if self._expand is not None and is_kernel(op):
            expanded = self._expand(op, params, operands, owners)
            if expanded is not None:
                outs, self._spelling.made, self._expansions[node] = expanded
                self._inside[self._kind_of_call(node)] = frozenset(
                    [t.op for t in self._spelling.made]
                )
                if tensor:
                    return outs[0]
                self._outputs[node] = outs
                return Term("kernel", owners=owners)
        args = tuple([o.term for o in operands if o.term is not None])
        if len(args) < len(operands):
            return self._leaf(node, "leaf")
        name = op_name(op)
        seen = tuple([o.shape for o in operands])
        raw = Term(
            name,
            args,
            normal_params(name, params, seen),
            shape=self.shape_of(node) if tensor else None,
            dtype=out.dtype if tensor else None,
            seen=seen,
            owners=owners,
        )
        if tensor:
            raw = self._spelling.with_casts(raw)
        return self._spelling.canonical(raw)

    def _transparent(
        self, node: Source, name: str, out: torch.Tensor
    ) -> tuple[Source, Term] | None:
        """The operand and the value that a node has which changes no element of it."""
        if (
            name not in LOOKED_THROUGH
            or not node.args
            or not isinstance(node.args[0], (Node, Call))
        ):
            return None
        source = node.args[0]
        term = self.term(source)
        if term is None or term.dtype is None:
            return None
        if name != "cast":
            if out.dtype != term.dtype:
                return None
            if name in VIEWS or self._keeps_order(node, name, source):
                return source, term
            return None
        if out.dtype == term.dtype:
            return source, term
        if (
            term.dtype in widened(out.dtype)
            and self._spelling.may_be(term, _CAST)
            and term.op == "cast"
        ):
            origin = term.args[0]
            if origin.dtype == out.dtype:
                return source, origin
        return None

    def _keeps_order(self, node: Source, name: str, source: Source) -> bool:
        _, params = arguments(node, self)
        seen = self.shape_of(source)
        return seen is not None and keeps_order(name, seen, self.shape_of(node) or (), dict(params))


def _sources(node: Source) -> list[Source]:
    """The nodes that ``node`` is computed from."""
    if isinstance(node, Node):
        return list(node.all_input_nodes)
    flat = tree_flatten((node.args, node.kwargs))[0]
    return [a for a in flat if isinstance(a, Call)]
