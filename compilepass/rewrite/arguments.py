"""How the arguments of a call are read, in a graph and in a recording alike."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch.fx import Node

from .operations import OPERAND_SLOTS, is_number, plain, schema_slots
from .record import Call
from .term import Shape, Term, const

__all__ = ["Operand", "Source", "Values", "arguments"]

Source = Node | Call


class Values(Protocol):
    """Who knows the values of nodes."""

    def term(self, node: Source) -> Term | None: ...
    def shape_of(self, node: Source) -> Shape | None: ...


class Operand(NamedTuple):
    """A tensor operand of a call: its argument's name, term, shape as used, and node."""

    name: str
    term: Term | None
    shape: Shape | None
    node: Source | None


def arguments(node: Source, values: Values) -> tuple[list[Operand], list[tuple[str, Any]]]:
    """The tensor operands, and the other arguments by name, defaults filled in."""
    operands: list[Operand] = []
    params: list[tuple[str, Any]] = []
    given, named = node.args, node.kwargs
    for i, (name, default) in enumerate(schema_slots(node.target)):
        value: Any = given[i] if i < len(given) else named.get(name, default)
        if isinstance(value, (Node, Call)):
            term = values.term(value)
            if term is not None or not is_number(value.meta.get("val")):
                operands.append(Operand(name, term, values.shape_of(value), value))
                continue
        elif isinstance(value, (list, tuple)) and any(
            isinstance(v, (Node, Call)) and values.shape_of(v) is not None for v in value
        ):
            for v in value:
                if v is not None:
                    operands.append(Operand(name, values.term(v), values.shape_of(v), v))
            params.append((name, tuple([v is not None for v in value])))
            continue
        value = plain(value)
        if name in OPERAND_SLOTS and is_number(value):
            operands.append(Operand(name, const(value), None, None))
        else:
            params.append((name, value))
    return operands, params
