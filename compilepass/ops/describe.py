"""Which implementation of an op runs, and why each other one does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import OpTypeError
from .custom_op import FALLBACKS, DispatchedOp, decide, implements
from .decision import Decision

__all__ = ["OpDescription", "describe"]


@dataclass(frozen=True)
class OpDescription:
    """The decision of an op, and for each forward that does not run the reason.

    ``replaced_by`` is the class that is built in place of the one asked about; ``missing`` says
    that nobody wrote the forward that was decided on.
    """

    decision: Decision
    others: Mapping[str, str]
    replaced_by: str | None = None
    missing: bool = False

    def __str__(self) -> str:
        decision = self.decision
        state = "enabled" if decision.enabled else "disabled"
        lines = [
            f"{decision.name}: {state} ({decision.why}) on platform {decision.platform}",
            f"  runs {decision.implementation}" + (" (missing: it raises)" if self.missing else ""),
            *(f"  {method}: {reason}" for method, reason in self.others.items()),
        ]
        if self.replaced_by:
            lines.insert(1, f"  built as {self.replaced_by}, which replaces it")
        return "\n".join(lines)


def describe(op: DispatchedOp | type[DispatchedOp]) -> OpDescription:
    """Say which forward of an op runs and why each other one does not.

    For an op, the decision it took when it was built; for a class, the one it would take now.
    """
    if isinstance(op, DispatchedOp):
        cls, decision, replacement = type(op), op.decision, None
    elif isinstance(op, type) and issubclass(op, DispatchedOp):
        replacement = op._registry.replacement(op)
        cls = replacement if replacement and issubclass(replacement, DispatchedOp) else op
        decision = decide(cls)
    else:
        raise OpTypeError(
            f"{op!r} is not a custom op",
            why="Only ops take a decision between native code and kernels.",
            hint="Give an op or its class.",
        )
    others = {m: _why_not(cls, decision, m) for m in cls._forwards if m != decision.method}
    built = f"{cls.__module__}.{cls.__qualname__}" if replacement else None
    return OpDescription(decision, others, built, not implements(cls, decision.method))


def _why_not(cls: type[DispatchedOp], decision: Decision, method: str) -> str:
    if not implements(cls, method):
        if method == "forward_oot" and not cls._registry.is_replacement(cls):
            return "no override registered"
        if method in FALLBACKS:
            return f"alias of {FALLBACKS[method].removeprefix('forward_')}"
        return "not implemented"
    if not decision.enabled:
        return f"the op is disabled: {decision.why}"
    if method == "forward_native":
        return f"the op is enabled: {decision.why}"
    return f"platform is {decision.platform}"
