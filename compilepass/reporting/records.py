"""The records that reports are made of: frozen, plain data, the same in text, JSON and HTML."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["GraphRecord", "MatchRecord", "NearMiss", "OpRecord", "PassRecord", "RuleRecord"]


@dataclass(frozen=True)
class NearMiss:
    """The place where a rule came closest to a match, or was refused one.

    ``blocker`` is the node that blocked it, ``matched`` of ``wanted`` the operations that fitted,
    ``source`` the line of the model, ``code`` a key of ``compilepass.rewrite.REJECT_CODES``.
    ``around`` says what made the blocker and what uses it, ``equivalences`` which spellings were
    read as another one.
    """

    rule: str
    code: str
    message: str
    blocker: str = ""
    expected: str = ""
    found: str = ""
    source: str = ""
    hint: str = ""
    matched: int = 0
    wanted: int = 0
    pass_name: str = ""
    around: str = ""
    equivalences: tuple[str, ...] = ()

    def __str__(self) -> str:
        who = f"{self.pass_name}, {self.rule}" if self.pass_name else self.rule
        lines = [f"{who}: {self.message} [{self.code}; {self.matched} of {self.wanted} matched]"]
        shown = {
            "blocker": self.blocker + (f" ({self.around})" if self.around else ""),
            "expected": self.expected,
            "found": self.found,
            "source": self.source,
            "read as": ", ".join(self.equivalences),
            "hint": self.hint,
        }
        lines += [f"  {label}: {value}" for label, value in shown.items() if value]
        return "\n".join(lines)


@dataclass(frozen=True)
class MatchRecord:
    """One rewritten site: the node that stands there now, and the model's lines it came from."""

    node: str
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleRecord:
    """What one rule did in one graph.

    ``refused`` counts matches that were not safe to rewrite or that the rule refused, ``declined``
    those that no kernel takes, ``candidates`` the places where the rule might have matched.
    """

    rule: str
    sites: tuple[MatchRecord, ...] = ()
    near_miss: NearMiss | None = None
    refused: int = 0
    declined: int = 0
    candidates: int = 0


@dataclass(frozen=True)
class PassRecord:
    """One pass on one graph. ``status`` is ``ran``, ``skipped``, ``disabled`` or ``failed``."""

    name: str
    status: str
    reason: str = ""
    changes: int = 0
    ms: float = 0.0
    rules: tuple[RuleRecord, ...] = ()

    def with_time(self, ms: float) -> PassRecord:
        return replace(self, ms=ms)


@dataclass(frozen=True)
class GraphRecord:
    """One compiled graph: its passes in the order of the plan.

    ``cpu_ms`` is the processor time of its passes, with what a process loads and traces once.
    """

    name: str
    is_inference: bool
    device: str
    nodes_before: int
    nodes_after: int
    passes: tuple[PassRecord, ...] = ()
    is_backward: bool = False
    cpu_ms: float = 0.0


@dataclass(frozen=True)
class OpRecord:
    """How many ops of one name were built, how they were decided, and what runs."""

    name: str
    state: str
    why: str
    implementation: str
    count: int = 1
