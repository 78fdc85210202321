"""Say in words where a rule stopped: which node, what was expected, what was found, what helps."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..reporting.records import NearMiss
from .canonical import Canonical
from .match import Failure
from .reject import REJECT_CODES, Reject
from .rule import Pattern
from .source import source_of
from .term import Term

__all__ = ["describe_failure", "describe_reject"]

_SHOWN = 4  # neighbours of the blocker

#: for refusals that say nothing themselves
_HINTS = {
    "scalar": "Keep the number in an attribute of the module, or compile with dynamic=None.",
    "device": "Move the values to one device.",
    "guard": "Write the pattern without a branch on sizes, or add a rule for the other sizes.",
    "cycle": "Split the rule, so that each replacement needs no output of its own.",
    "kernel_unavailable": "Install or register a kernel for this device; native code runs.",
    "kernel_declined": "Bring the inputs to what the kernel takes; native code runs.",
    "check": "The rule itself refuses this site; see its check.",
    "error": "This is for the author of the rule to correct.",
}


def describe_failure(pattern: Pattern, failure: Failure, canonical: Canonical) -> NearMiss:
    """The near miss for a candidate that does not have the pattern's form."""
    node = _node_of(failure.found) or (_node_of(failure.user) if failure.user else None)
    what = f" ({failure.what})" if failure.what else ""
    spelled = (canonical.spelled.get(t) for t in failure.bound)
    return NearMiss(
        rule=str(pattern.rule),
        code=failure.code,
        message=f"{REJECT_CODES[failure.code]}{what}",
        blocker=_node_text(node),
        expected=_expected(failure),
        found=_found(failure),
        source=source_of(node),
        hint=_hint(failure),
        matched=failure.matched,
        wanted=pattern.wanted,
        around=_around(node),
        equivalences=tuple(sorted({name for name in spelled if name})),
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
        hint=reject.hint or _HINTS.get(reject.code, ""),
        matched=pattern.wanted,
        wanted=pattern.wanted,
        around=_around(reject.node),
    )


def _expected(failure: Failure) -> str:
    return _side(failure, failure.pattern, failure.expected)


def _found(failure: Failure) -> str:
    if failure.code == "scalar":
        return "a tensor"
    return _side(failure, failure.found, failure.actual)


def _side(failure: Failure, term: Term, value: Any) -> str:
    """One side of a failure: the value that differs, or the operation where that is what does."""
    if failure.code == "binding":
        return _name(value)
    if failure.code == "dim":
        dims = value if isinstance(value, (tuple, list)) else (value,)
        return f"dim{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))}"
    return _text(term if value is None or value == term.op else value)


def _name(term: Term) -> str:
    node = _node_of(term)
    return node.name if node is not None else _text(term)


def _node_of(term: Term) -> Node | None:
    return term.node or next(iter(term.owners), None)


def _node_text(node: Node | None) -> str:
    return f"{node.name} = {node.target}" if node is not None else ""


def _around(node: Node | None) -> str:
    """Who made the blocker and who uses it."""
    if node is None:
        return ""
    parts = []
    for verb, others in (("made from", node.all_input_nodes), ("used by", list(node.users))):
        if others:
            names = ["the output" if n.op == "output" else n.name for n in others[:_SHOWN]]
            more = ", …" if len(others) > _SHOWN else ""
            parts.append(f"{verb} {', '.join(names)}{more}")
    return "; ".join(parts)


def _text(value: Any) -> str:
    if isinstance(value, Term):
        if value.is_const:
            return str(value.value)
        if value.op in ("input", "leaf"):
            return "a tensor"
        if value.op == "getitem":
            return value.args[0].op
        if _adds_bias(value):
            return "add of a bias"
        if _is_silu(value):
            return "silu"
        return value.op + _unusual(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value).replace("$", "")


def _adds_bias(term: Term) -> bool:
    """Whether this is the addition inside ``addmm``, which no line of the model shows."""
    calls = [n.target for n in term.owners]
    return term.op == "add" and torch.ops.aten.addmm.default in calls


def _is_silu(term: Term) -> bool:
    """Whether this is ``x / (1 + exp(-x))``, as which compiled graphs have ``silu(x)``."""
    if term.op != "div" or len(term.args) != 2 or term.args[1].op != "add":
        return False
    grown = next((a for a in term.args[1].args if a.op == "exp"), None)
    return grown is not None and grown.args[0].op == "neg" and grown.args[0].args[0] is term.args[0]


def _unusual(term: Term) -> str:
    """The arguments of a call that are not at their defaults, such as ``(alpha=2)``."""
    if term.op in ("clamp_min", "clamp_max"):
        return f"({', '.join(f'{k}={v}' for k, v in term.params)})"
    schema = getattr(term.owners[0].target, "_schema", None) if term.owners else None
    if schema is None:
        return ""
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given = [f"{k}={v}" for k, v in term.params if k in defaults and v != defaults[k]]
    return f"({', '.join(given)})" if given else ""


def _hint(failure: Failure) -> str:
    expected, found = _expected(failure), _found(failure)
    if failure.code == "op" and _adds_bias(failure.found):
        return "The rule has no bias here: leave it out (bias=False), or add a rule with one."
    hints = {
        "op": f"The rule has {expected} here: write it so, or add a rule for this form.",
        "arity": f"The rule takes {expected} operands here; add a rule for {found}.",
        "dtype": "Bring both sides to one dtype; the kernel would change the result's dtype.",
        "shape": "Bring the value to the rule's shape, or add a rule for this one.",
        "broadcast": "Give the operand the dimensions of the rule's, with unsqueeze or reshape.",
        "dim": "The rule works along another dimension; move it there.",
        "literal": f"Use {expected}, or make the number a parameter of the rule, so that any "
        "value matches.",
        "keyword": f"The replacement would ignore {failure.what}: leave it at its default.",
        "binding": "Use the same value in both places; the replacement takes it once.",
        "scalar": "The number is a tensor in this graph (dynamic=True makes a float argument one): "
        "keep it in an attribute of the module, or compile with dynamic=None.",
    }
    return hints.get(failure.code, "")
