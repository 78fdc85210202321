"""Remove operations that change nothing.

Before::

    a = reshape(x, [2, 8, 64]); b = reshape(a, [16, 64]); c = b.to(float32)   # b is float32

After::

    b = reshape(x, [16, 64])                                     # c is b
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from compilepass import Pass, PassContext, Phase

__all__ = ["EliminateNoops"]

aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_VIEWS = (*_RESHAPES, aten.expand.default, aten.alias.default, aten.slice.Tensor)


class EliminateNoops(Pass):
    """Views, slices, expands and casts that give their input back; a reshape of a reshape."""

    name = "eliminate_noops"
    phase = Phase.CANONICALIZE

    def run(self, graph: Graph, ctx: PassContext) -> int:
        changes = 0
        for node in list(graph.nodes):
            source = _source(node)
            while source is not None:
                if _is_noop(node, source) and not _would_alias_output(node, source):
                    node.replace_all_uses_with(source)
                    graph.erase_node(node)
                    changes += 1
                    break
                if not _is_reshape_of_reshape(node, source):
                    break
                node.replace_input_with(source, source.args[0])
                if not source.users:
                    graph.erase_node(source)
                changes += 1
                source = _source(node)  # which it may now give back
        return changes


def _source(node: Node) -> Node | None:
    """The tensor that an operation takes first."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if isinstance(source, Node) and isinstance(source.meta.get("val"), torch.Tensor):
        return source
    return None


def _is_noop(node: Node, source: Node) -> bool:
    if node.target is torch.ops.prims.convert_element_type.default:
        return bool(node.args[1] == source.meta["val"].dtype)
    if node.target not in _VIEWS:
        return False
    val, before = node.meta.get("val"), source.meta["val"]
    return isinstance(val, torch.Tensor) and _layout(val) == _layout(before)


def _layout(val: torch.Tensor) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sizes and strides as text, which compares symbolic sizes without adding guards."""
    return tuple(map(str, val.shape)), tuple(map(str, val.stride()))


def _is_reshape_of_reshape(node: Node, source: Node) -> bool:
    return node.target in _RESHAPES and source.target in _RESHAPES


def _would_alias_output(node: Node, source: Node) -> bool:
    """A placeholder or a value returned twice must not take the place of a returned view."""
    returned = any(user.op == "output" for user in node.users)
    return returned and (
        source.op == "placeholder" or any(user.op == "output" for user in source.users)
    )
