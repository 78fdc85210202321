"""A graph as a Python file that people can read and that runs by itself.

Every value has its dtype and shape beside it, every new source line of the model is a comment, and
``inputs()`` makes tensors of the right shapes, strides and dtypes: small random numbers, and zeros
for integers that may be indices.
"""

from __future__ import annotations

import operator
import textwrap
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..rewrite.source import source_of

__all__ = ["graph_source"]

_HEADER = '''"""{title}"""

import operator
from math import inf, nan

import torch

import compilepass.kernels


def forward({args}):
{body}


def inputs():
    torch.manual_seed(0)
{inputs}


if __name__ == "__main__":
    with torch.no_grad():
        outputs = forward(*inputs())
    for i, value in enumerate(outputs if isinstance(outputs, (tuple, list)) else [outputs]):
        print(i, (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value)
'''

_MAKE = """    def make(shape, stride, dtype, device):
        out = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if dtype.is_floating_point or dtype.is_complex:
            return out.copy_(torch.randn(shape))
        return out.copy_(torch.randint(-127, 128, shape)) if dtype is torch.int8 else out.zero_()
"""


def graph_source(graph: Graph, title: str) -> str:
    """The text of a Python file with ``graph`` as ``forward`` and its example ``inputs``."""
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    made = [f"        {_example(n)},  # {n.name}" for n in graph.nodes if n.op == "placeholder"]
    inputs = _MAKE + "\n    return (\n" + "\n".join(made) + "\n    )" if made else "    return ()"
    body = textwrap.indent("\n".join(_lines(graph)), "    ")
    return _HEADER.format(title=title, args=", ".join(names), body=body, inputs=inputs)


def _lines(graph: Graph) -> list[str]:
    lines: list[str] = []
    last = ""
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        source = source_of(node)
        if source and source != last:
            lines.append(f"# {source}")
            last = source
        if node.op == "output":
            lines.append(f"return {_literal(node.args[0])}")
        elif node.op == "get_attr":
            lines += _attribute(node, graph)
        else:
            lines.append(f"{node.name} = {_call(node)}{_note(node)}")
    return lines or ["pass"]


def _attribute(node: Node, graph: Graph) -> list[str]:
    owner: Any = graph.owning_module
    for part in str(node.target).split("."):
        owner = getattr(owner, part)
    if isinstance(owner, GraphModule):
        names = [n.name for n in owner.graph.nodes if n.op == "placeholder"]
        body = textwrap.indent("\n".join(_lines(owner.graph)), "    ")
        return [f"def {node.name}({', '.join(names)}):", *body.splitlines()]
    if isinstance(owner, torch.Tensor) and owner.numel() <= 64:
        values = f"torch.tensor({owner.tolist()!r}, dtype={owner.dtype})"
        return [f"{node.name} = {values}  # constant"]
    shape = tuple(owner.shape)
    return [f"{node.name} = torch.ones({shape}, dtype={owner.dtype})  # a constant of the model"]


def _call(node: Node) -> str:
    if node.target is operator.getitem:
        return f"{_literal(node.args[0])}[{_literal(node.args[1])}]"
    args = [_literal(a) for a in node.args]
    args += [f"{k}={_literal(v)}" for k, v in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    return f"{_target(node.target)}({', '.join(args)})"


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"  # type: ignore[no-untyped-call]
    module = getattr(target, "__module__", "")
    if module in ("_operator", "operator"):
        return f"operator.{target.__name__}"
    return f"{module}.{target.__name__}" if module else str(target)


def _literal(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_literal, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_literal(value.start)}, {_literal(value.stop)}, {_literal(value.step)})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, torch._ops.OpOverload):
        return f"torch.ops.{value}"
    return (
        str(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
        else repr(value)
    )


def _note(node: Node) -> str:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return ""
    dtype = str(val.dtype).removeprefix("torch.")
    return f"  # {dtype}[{', '.join(map(str, val.shape))}]"


def _example(node: Node) -> str:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        shape, stride = _hints(val.shape), _hints(val.stride())
        return f"make({shape}, {stride}, {val.dtype}, {str(val.device)!r})"
    return _hint(val)


def _hints(sizes: Any) -> str:
    inner = ", ".join(_hint(s) for s in sizes)
    return f"({inner},)" if len(sizes) == 1 else f"({inner})"


def _hint(value: Any) -> str:
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return repr(value.node.hint) if value.node.hint is not None else "8"
    return repr(value)
