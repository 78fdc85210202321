"""Why a rule did not fire: a refusal is a value with a code, a blocking node and a sentence.

No part of the engine answers ``False`` or raises into the compiler; it returns a :class:`Reject`.
The codes are a closed set, so that tools and tests can rely on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

__all__ = ["DECLINED", "REJECT_CODES", "Reject"]

REJECT_CODES: dict[str, str] = {
    "op": "another operation stands where the pattern wants one",
    "arity": "the operation has another number of tensor operands",
    "dtype": "a value has another dtype than the pattern at this place",
    "shape": "a value has another shape than the pattern at this place",
    "broadcast": "an operand is broadcast along other dimensions than in the pattern",
    "dim": "the operation works along another dimension",
    "literal": "a number differs from the one in the pattern",
    "keyword": "an argument, often one left at its default, has another value",
    "binding": "one variable of the pattern would stand for two different values",
    "scalar": "a number of the pattern is a tensor here that cannot be read as a number",
    "extra_user": "a value inside the match is also used outside of it",
    "partial_kernel": "only a part of a fused kernel call is inside the match",
    "mutation": "something between the nodes of the match is mutated",
    "cycle": "the replacement would need its own result",
    "layout": "an output would come back with other strides",
    "contract": "an output would come back with another shape, dtype or device",
    "device": "the values of the match are on different devices",
    "guard": "a size condition that the pattern was traced under does not hold",
    "kernel_unavailable": "the kernel has no implementation on this device",
    "kernel_declined": "every implementation of the kernel declines these inputs",
    "numerics": "the replacement computes something else (verify=True)",
    "check": "the rule's own check refused",
    "training": "the graph has a backward pass and the rule is for inference only",
    "error": "the rule's own code raised",
}


#: the refusals that are a kernel's, not the rule's
DECLINED = frozenset(["kernel_unavailable", "kernel_declined"])


@dataclass(frozen=True)
class Reject:
    """One refusal. ``code`` is a key of :data:`REJECT_CODES`; ``node`` blocked the match."""

    code: str
    message: str
    node: Node | None = None
    expected: str = ""
    found: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        if self.code not in REJECT_CODES:
            raise ValueError(f"unknown reject code {self.code!r}; known: {sorted(REJECT_CODES)}")

    def at(self, node: Node | None) -> Reject:
        """The same refusal with its blocking node filled in, where none is named yet."""
        return self if self.node is not None or node is None else replace(self, node=node)

    def to_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "node": self.node.name if self.node is not None else "",
            "expected": self.expected,
            "found": self.found,
            "hint": self.hint,
        }
