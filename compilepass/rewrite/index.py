"""The calls of a graph by what they may compute.

A rule looks at a few of a graph's thousands of nodes. They are found through the graph's own table
of calls by target, which every edit keeps up to date, so no pass over the graph is needed.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..torch_compat import call_targets
from .equivalences import Entry, makers_of
from .operations import LOOKED_THROUGH, is_kernel, op_name

__all__ = ["CallIndex"]


class CallIndex:
    """The calls of ``graph``, which may change meanwhile."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known = -1  # how many targets there were
        self._targets: dict[str, list[Any]] = {}

    @functools.cached_property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of all tensors of the graph; those of later nodes are added by the caller."""
        return dtypes_of(self._graph.nodes)

    def named(self, op: str) -> list[Node]:
        """The calls of an operation, of all overloads."""
        return [n for target in self._by_name().get(op, ()) for n in self._calls(target)]

    def kernels(self) -> list[Node]:
        """The calls of ops that may have a native form."""
        targets = [t for group in self._by_name().values() for t in group if is_kernel(t)]
        return [n for target in targets for n in self._calls(target)]

    def mutable_calls(self) -> Iterator[Node]:
        """The calls of operations that may write to an operand."""
        for group in self._by_name().values():
            for target in group:
                if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
                    yield from self._calls(target)

    def makers(self, op: str, above: frozenset[str] = frozenset()) -> dict[Node, None]:
        """The calls that may compute an ``op``, in one of its spellings too; no kernels.

        ``above`` are operations that are being looked for already.
        """
        found = dict.fromkeys(self.named(op))
        above |= {op}
        for entry in makers_of(op):
            if not entry.of:
                for name in entry.ops - above:
                    found.update(self.makers(name, above))
                continue
            found.update(dict.fromkeys(self.users_of(entry, above)))
        return found

    def users_of(self, entry: Entry, above: frozenset[str]) -> Iterator[Node]:
        """The calls to which ``entry`` may apply, found from the operands that it needs."""
        by_name = self._by_name()
        if any(self._calls(t) for name in entry.ops for t in by_name.get(name, ())):
            for op in entry.of - above:
                yield from _users_named(list(self.makers(op, above)), entry.ops)

    def _by_name(self) -> dict[str, list[Any]]:
        targets = call_targets(self._graph)
        if len(targets) != self._known:
            self._known = len(targets)
            self._targets = defaultdict(list)
            for target in targets:
                self._targets[op_name(target)].append(target)
        return self._targets

    def _calls(self, target: Any) -> list[Node]:
        found: Any = self._graph.find_nodes(op="call_function", target=target, sort=False)
        return list(found)


def dtypes_of(nodes: Iterable[Node]) -> set[torch.dtype]:
    """The dtypes of all that ``nodes`` compute."""
    vals: list[Any] = [node.meta.get("val") for node in nodes]
    vals += [v for val in vals if type(val) in (tuple, list) for v in val]
    found = {getattr(val, "dtype", None) for val in vals}
    return {dtype for dtype in found if dtype is not None}


def _users_named(nodes: list[Node], ops: frozenset[str]) -> Iterator[Node]:
    """The users of ``nodes``, also through views and casts, that have one of these names."""
    todo, seen = list(nodes), set(nodes)
    while todo:
        for user in todo.pop().users:
            if user in seen or user.op != "call_function":
                continue
            name = op_name(user.target)
            if name in ops:
                yield user
            if name in ops or name in LOOKED_THROUGH or name == "getitem":
                seen.add(user)
                todo.append(user)
