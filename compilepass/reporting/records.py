"""The records that reports are made of: frozen, plain data, the same in text, JSON and HTML."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NearMiss"]


@dataclass(frozen=True)
class NearMiss:
    """The place where a rule came closest to a match, or was refused one.

    ``blocker`` is the node that blocked it, ``matched`` of ``wanted`` the operations that fitted,
    ``source`` the line of the model, ``code`` a key of
    :data:`compilepass.rewrite.REJECT_CODES`.
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

    def __str__(self) -> str:
        lines = [f"{self.rule}: {self.message} [{self.code}, {self.matched} of {self.wanted}]"]
        for label in ("blocker", "expected", "found", "source", "hint"):
            value = getattr(self, label)
            if value:
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)
