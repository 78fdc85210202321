"""Matrix products of one input with weights that lie side by side become one.

Before::

    q = addmm(bias_q, x, packed[:4096].t())
    k = addmm(bias_k, x, packed[4096:5120].t())

After::

    both = addmm(cat([bias_q, bias_k]), x, packed.t())
    q = both[:, :4096]; k = both[:, 4096:]
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node, map_arg

from compilepass import Pass, PassContext, Phase

from ..utility.coalesce_splits import Part, part_of
from ..utility.restride import replace

__all__ = ["MergeLinears"]

aten = torch.ops.aten


class _Product(NamedTuple):
    """``x @ rows.t()``, plus ``bias`` where it has one."""

    node: Node
    x: Node
    columns: Node
    rows: Part
    bias: Node | None


class MergeLinears(Pass):
    """Weights are slices of one tensor in the graph, as :func:`compilepass.merge_linears_` makes
    them; those that others cut from a packed parameter are taken, too.

    Platforms and dtypes: all that multiply. ``x`` is any number of rows, known or not; the sizes of
    the weights are known. Off by default: measured on the CPU, one product takes as long as two or
    three, but for one row in bfloat16.
    """

    name = "merge_linears"
    phase = Phase.CANONICALIZE
    default = False
    after = ("eliminate_common_subexpressions", "eliminate_noops")
    before = ("coalesce_splits",)

    def run(self, graph: Graph, ctx: PassContext) -> int:
        found: dict[tuple[Node, Node, bool], list[_Product]] = defaultdict(list)
        for node in graph.nodes:
            product = _product(node)
            if product is not None:
                # a bias is added before the product is rounded, so those without are apart
                key = product.x, product.rows.source, product.bias is None
                found[key].append(product)
        groups = [run for products in found.values() for run in _side_by_side(products)]
        return sum([_merge(graph, group) for group in groups])


def _product(node: Node) -> _Product | None:
    if node.target is aten.mm.default:
        bias, (x, columns) = None, node.args
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, x, columns = node.args
    else:
        return None
    if not isinstance(columns, Node) or columns.target is not aten.permute.default:
        return None
    rows, order = columns.args
    part = part_of(rows) if isinstance(rows, Node) and order == [1, 0] else None
    if part is None or part.dim != 0 or not isinstance(x, Node):
        return None
    if bias is not None and (
        not isinstance(bias, Node) or bias.meta["val"].shape != (part.end - part.start,)
    ):
        return None
    return _Product(node, x, columns, part, bias)


def _side_by_side(products: list[_Product]) -> list[list[_Product]]:
    """Runs of two or more whose weights follow one another, each weight once."""
    runs: list[list[_Product]] = []
    for product in sorted(products, key=lambda p: (p.rows.start, p.node)):
        if runs and runs[-1][-1].rows.end == product.rows.start:
            runs[-1].append(product)
        else:
            runs.append([product])
    return [run for run in runs if len(run) > 1]


def _merge(graph: Graph, products: list[_Product]) -> bool:
    first = min(p.node for p in products)
    biases = [p.bias for p in products if p.bias is not None]
    if not all(b < first for b in biases):
        return False
    x, (weight, _, start, _), end = products[0].x, products[0].rows, products[-1].rows.end
    made: list[Node] = []

    def call(target: torch._ops.OpOverload, *args: Any) -> Node:
        node = graph.call_function(target, args)
        node.meta.update(first.meta)
        values = map_arg(args, lambda n: n.meta["val"])
        with first.meta["val"].fake_mode:
            node.meta["val"] = target(*values)
        made.append(node)
        return node

    with graph.inserting_before(first):
        if end - start < weight.meta["val"].shape[0]:
            weight = call(aten.slice.Tensor, weight, 0, start, end)
        columns = call(aten.permute.default, weight, [1, 0])
        if biases:
            whole = call(aten.addmm.default, call(aten.cat.default, biases), x, columns)
        else:
            whole = call(aten.mm.default, x, columns)
        parts = {
            p.node: call(aten.slice.Tensor, whole, 1, p.rows.start - start, p.rows.end - start)
            for p in products
        }
    if replace(graph, parts):
        _erase_unused(graph, [p.columns for p in products])
        return True
    _erase_unused(graph, made[::-1])
    return False


def _erase_unused(graph: Graph, nodes: list[Node]) -> None:
    """Erase those that nobody needs, with the views that they were made of."""
    while nodes:
        node = nodes.pop(0)
        if not node.users and node.op == "call_function" and not node._erased:
            sources = node.all_input_nodes
            graph.erase_node(node)
            nodes += sources
