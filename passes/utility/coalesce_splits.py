"""Do not put together what is taken apart again, and take a tensor apart at once.

Before::

    whole = cat([a, b, c], -1); left = whole[:, :8]; right = whole[:, 8:]   # a is 8 wide
    p = x[:, :4]; q = x[:, 4:12]; r = x[:, 12:]                             # all of x

After::

    left = a; right = cat([b, c], -1)
    p, q, r = split_with_sizes(x, [4, 8, 4], 1)
"""

from __future__ import annotations

import operator
from collections import defaultdict
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compilepass import Pass, PassContext, Phase

from .restride import replace

__all__ = ["CoalesceSplits", "Part", "part_of"]

aten = torch.ops.aten

_WORTH_A_SPLIT = 3  # slices; halves are what the models write and the rules of rotations read


class Part(NamedTuple):
    """A stretch of a tensor along a dimension."""

    source: Node
    dim: int
    start: int
    end: int


class CoalesceSplits(Pass):
    """Parts of a concatenation that end where its pieces do, and parts that make up a tensor.

    Platforms and dtypes: all. Sizes along the dimension are known numbers; others may be symbols.
    Values that the graph writes to are left alone, and so is a part that is returned.
    """

    name = "coalesce_splits"
    phase = Phase.CANONICALIZE
    after = ("eliminate_common_subexpressions", "eliminate_noops")

    def run(self, graph: Graph, ctx: PassContext) -> int:
        if any(_is_mutable(node) for node in graph.nodes):
            return 0
        changes = sum([_take_piece(graph, node) for node in list(graph.nodes)])
        slices: dict[tuple[Node, int], list[tuple[Part, Node]]] = defaultdict(list)
        for node in graph.nodes:
            part = part_of(node) if node.target is aten.slice.Tensor else None
            if part is not None:
                slices[part.source, part.dim].append((part, node))
        for (source, dim), parts in slices.items():
            changes += _split_at_once(graph, source, dim, sorted(parts, key=lambda p: p[0].start))
        return changes


def part_of(node: Node) -> Part | None:
    """The stretch that a ``slice``, or a part of a ``split``, is; ``None`` for anything else."""
    if node.op != "call_function":
        return None
    if node.target is aten.slice.Tensor:
        return _slice(node)
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, Node) or source.target not in (
        aten.split.Tensor,
        aten.split_with_sizes.default,
    ):
        return None
    whole, dim = source.args[0], source.args[2] if len(source.args) > 2 else 0
    parts = source.meta["val"]
    if not isinstance(whole, Node) or not isinstance(dim, int) or source.kwargs:
        return None
    dim %= parts[0].dim()
    sizes = [p.shape[dim] for p in parts]
    index = node.args[1]
    if not all(isinstance(s, int) for s in sizes) or not isinstance(index, int):
        return None
    start = sum(sizes[:index])
    return Part(whole, dim, start, start + sizes[index])


def _slice(node: Node) -> Part | None:
    given = list(node.args) + [0, None, None, 1][len(node.args) - 1 :]
    source, dim, start, end, step = given
    if not isinstance(source, Node) or node.kwargs or step != 1:
        return None
    shape = source.meta["val"].shape
    assert isinstance(dim, int)
    dim %= len(shape)
    size = shape[dim]
    if not isinstance(size, int) or not all(b is None or isinstance(b, int) for b in (start, end)):
        return None
    begin, stop, _ = slice(start, end).indices(size)
    return Part(source, dim, begin, stop) if begin < stop else None


def _take_piece(graph: Graph, node: Node) -> bool:
    """Let the pieces of a concatenation that a part consists of take its place."""
    part = part_of(node)
    if part is None or part.source.target is not aten.cat.default or _is_returned(graph, node):
        return False
    pieces, dim = part.source.args[0], part.source.args[1] if len(part.source.args) > 1 else 0
    if not isinstance(pieces, (list, tuple)) or not isinstance(dim, int):
        return False
    rank = part.source.meta["val"].dim()
    values = [p.meta["val"] for p in pieces if isinstance(p, Node)]
    if dim % rank != part.dim or not all(v.dim() == rank for v in values):
        return False
    if any(v.dtype != part.source.meta["val"].dtype for v in values):
        return False
    sizes = [v.shape[part.dim] for v in values]
    if not all(isinstance(s, int) for s in sizes):
        return False
    ends = [0, *accumulate(sizes)]
    if part.start not in ends or part.end not in ends:
        return False
    inside = [
        p
        for p, start, end in zip(pieces, ends, ends[1:], strict=False)
        if part.start <= start < end <= part.end
    ]
    if len(inside) == len([s for s in sizes if s]):
        return False  # all of it
    (taken,) = inside if len(inside) == 1 else (None,)
    if taken is None:
        with graph.inserting_before(node):
            taken = graph.call_function(aten.cat.default, (inside, part.dim))
        taken.meta.update(part.source.meta)
        with node.meta["val"].fake_mode:
            taken.meta["val"] = torch.cat([p.meta["val"] for p in inside], part.dim)
    split = node.args[0]
    if not replace(graph, {node: taken}):
        if len(inside) > 1:
            graph.erase_node(taken)
        return False
    for unused in (split, part.source):
        if isinstance(unused, Node) and not unused.users:
            graph.erase_node(unused)
    return True


def _split_at_once(graph: Graph, source: Node, dim: int, parts: list[tuple[Part, Node]]) -> int:
    """Put one split in the place of slices that make up all of a tensor."""
    ends = [0, *(part.end for part, _ in parts)]
    starts = [part.start for part, _ in parts]
    if (
        len(parts) < _WORTH_A_SPLIT
        or starts != ends[:-1]
        or ends[-1] != source.meta["val"].shape[dim]
    ):
        return 0
    sizes = [part.end - part.start for part, _ in parts]
    first = min(node for _, node in parts)
    with graph.inserting_before(first):
        split = graph.call_function(aten.split_with_sizes.default, (source, sizes, dim))
        split.meta.update(first.meta)
        split.meta["val"] = [node.meta["val"] for _, node in parts]
        items = [graph.call_function(operator.getitem, (split, i)) for i in range(len(parts))]
    for item, (_, node) in zip(items, parts, strict=True):
        item.meta.update(node.meta)
        node.replace_all_uses_with(item)
        graph.erase_node(node)
    return 1


def _is_returned(graph: Graph, node: Node) -> bool:
    """Whether a result of the graph is a view of ``node``, and would become one of an input."""
    mine = node.meta["val"].untyped_storage()._cdata
    results = [n.meta["val"] for n in graph.output_node().all_input_nodes]
    return any(isinstance(r, Tensor) and r.untyped_storage()._cdata == mine for r in results)


def _is_mutable(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
