"""Let a value with other strides take another one's place, and keep the metadata after it right.

What follows is computed anew on fake tensors, as far as strides differ. Results of the graph keep
theirs: by a copy where they were row-major. Nothing is changed where that cannot be done.
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
    if not all(_is_row_major(n.meta["val"]) for n in returned):
        return False
    for node in returned:
        _return_a_copy(graph, node, nodes.get(node, node))
    for node, value in changed.items():
        if node not in nodes:
            node.meta["val"] = value
            node.meta.pop("tensor_meta", None)
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
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: changed.get(n, n.meta["val"]))
    fake: Any = next(t for v in changed.values() for t in tree_leaves(v) if isinstance(t, Tensor))
    try:
        with fake.fake_mode:
            return target(*args, **kwargs)
    except RuntimeError:  # a view that the new strides do not allow
        return None


def _is_row_major(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_contiguous()


def _return_a_copy(graph: Graph, old: Node, new: Node) -> None:
    output = graph.output_node()
    with graph.inserting_before(output):
        row_major: dict[str, Argument] = {"memory_format": torch.contiguous_format}
        copy = graph.call_function(aten.clone.default, (new,), row_major)
    copy.meta.update(old.meta)
    output.replace_input_with(old, copy)
