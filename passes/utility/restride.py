"""Let a value with other strides take another one's place, and keep the metadata after it right.

What follows is computed anew on fake tensors, as far as strides differ. Results of the graph keep
theirs, by a copy. Nothing is changed where that cannot be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg
from torch.fx.node import Argument
from torch.utils._pytree import tree_leaves

__all__ = ["layout", "replace"]

aten = torch.ops.aten


def layout(value: Any) -> Any:
    """Sizes and strides that mean something, as text: comparing symbols would add guards."""
    leaves: list[Any] = []
    for item in tree_leaves(value):
        if isinstance(item, Tensor):
            pairs = zip(item.shape, item.stride(), strict=True)
            leaves.append([(str(n), str(s)) for n, s in pairs if str(n) != "1"])
        else:
            leaves.append(str(item))
    return leaves


def replace(graph: Graph, nodes: Mapping[Node, Node]) -> bool:
    """Put each value in the place of its key, which is erased; false if nothing was changed."""
    values = {old: new.meta["val"] for old, new in nodes.items()}
    changed = {old: v for old, v in values.items() if layout(v) != layout(old.meta["val"])}
    returned: list[Node] = []
    for node in graph.nodes:
        if node in nodes or not any(n in changed for n in node.all_input_nodes):
            continue
        if node.op == "output":
            returned = [n for n in node.all_input_nodes if n in changed]
            continue
        value = _value(node, changed)
        if value is None:
            return False
        if layout(value) != layout(node.meta["val"]):
            changed[node] = value
    orders = {n: _order(n.meta["val"], changed[n]) for n in returned}
    if None in orders.values():
        return False
    for node, value in changed.items():
        if node not in nodes:
            node.meta["val"] = value
            node.meta.pop("tensor_meta", None)
    for node, order in orders.items():
        assert order is not None
        _return_a_copy(graph, node, nodes.get(node, node), order)
    for old, new in nodes.items():
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    return True


def _value(node: Node, changed: Mapping[Node, Any]) -> Any:
    """What a call gives for the changed values; ``None`` where strides decide what it means."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if target in (aten.as_strided.default, aten.as_strided_copy.default):
        return None
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(target.tags):
        return None  # it would get sizes of another name
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: changed.get(n, n.meta["val"]))
    fake: Any = next(t for v in changed.values() for t in tree_leaves(v) if isinstance(t, Tensor))
    try:
        with fake.fake_mode:
            return target(*args, **kwargs)
    except RuntimeError:  # a view that the new strides do not allow
        return None


def _order(wanted: Any, value: Any) -> list[int] | None:
    """The dims of ``wanted`` as they lie in memory, if a copy of ``value`` can lie like that."""
    if not isinstance(wanted, Tensor):
        return None
    try:
        order = list(wanted.dim_order())
    except RuntimeError:
        return None
    return order if layout(_laid_out(value, order)) == layout(wanted) else None


def _laid_out(value: Tensor, order: list[int]) -> Tensor:
    """A copy of ``value`` that is row-major in ``order``."""
    back = [order.index(i) for i in range(len(order))]
    with value.fake_mode:  # type: ignore[attr-defined]
        return value.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _return_a_copy(graph: Graph, old: Node, new: Node, order: list[int]) -> None:
    output = graph.output_node()
    moved = order != sorted(order)
    row_major: dict[str, Argument] = {"memory_format": torch.contiguous_format}

    def call(target: torch._ops.OpOverload, source: Node, *args: Any, **named: Any) -> Node:
        node = graph.call_function(target, (source, *args), named)
        node.meta.update(old.meta)
        fake: Any = source.meta["val"]
        with fake.fake_mode:
            node.meta["val"] = target(fake, *args, **named)
        return node

    with graph.inserting_before(output):
        value = call(aten.permute.default, new, order) if moved else new
        value = call(aten.clone.default, value, **row_major)
        if moved:
            back = [order.index(i) for i in range(len(order))]
            value = call(aten.permute.default, value, back)
    output.replace_input_with(old, value)
