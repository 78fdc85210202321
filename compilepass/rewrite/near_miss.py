"""Say in words where a rule stopped: which node, what was expected, what was found."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..reporting.records import NearMiss
from .match import Failure
from .reject import REJECT_CODES, Reject
from .rule import Pattern
from .source import source_of
from .term import Term

__all__ = ["describe_failure", "describe_reject"]


def describe_failure(pattern: Pattern, failure: Failure) -> NearMiss:
    """The near miss for a candidate that does not have the pattern's form."""
    node = failure.found.node or next(iter(failure.found.owners), None)
    what = f" ({failure.what})" if failure.what else ""
    return NearMiss(
        rule=str(pattern.rule),
        code=failure.code,
        message=f"{REJECT_CODES[failure.code]}{what}",
        blocker=_node_text(node),
        expected=_text(failure.expected if failure.expected is not None else failure.pattern.op),
        found=_text(failure.actual if failure.actual is not None else failure.found.op),
        source=source_of(node),
        hint=_hint(failure),
        matched=min(failure.matched, pattern.wanted),
        wanted=pattern.wanted,
    )


def describe_reject(pattern: Pattern, reject: Reject) -> NearMiss:
    """The near miss for a match that was found but refused."""
    return NearMiss(
        rule=str(pattern.rule),
        code=reject.code,
        message=reject.message,
        blocker=_node_text(reject.node),
        expected=reject.expected,
        found=reject.found,
        source=source_of(reject.node),
        hint=reject.hint,
        matched=pattern.wanted,
        wanted=pattern.wanted,
    )


def _node_text(node: Node | None) -> str:
    return f"{node.name} = {node.target}" if node is not None else ""


def _text(value: Any) -> str:
    if isinstance(value, Term):
        return "a number" if value.is_const else value.op
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value).replace("$", "")


def _hint(failure: Failure) -> str:
    if failure.code == "dtype":
        return "Bring both sides to one dtype; the kernel would change the result's dtype."
    if failure.code == "dim":
        return "The rule works along the last dimension; move it there."
    if failure.code == "scalar":
        return (
            "The number is a tensor in this graph (dynamic=True makes a float argument one): "
            "keep it in an attribute of the module, or compile with dynamic=None."
        )
    return ""
