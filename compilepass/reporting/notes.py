"""Things a user must be told that belong to no single graph: a kernel build that failed, say.

A note is kept once per (source, message) for the life of the process; every report shows them all.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

__all__ = ["Note", "note", "notes"]

_log = logging.getLogger("compilepass")
_lock = threading.Lock()
_notes: dict[tuple[str, str], Note] = {}


@dataclass(frozen=True)
class Note:
    """``source`` is the part that speaks (``"kernels.cpu"``), ``message`` is for people."""

    source: str
    message: str


def note(source: str, message: str) -> None:
    """Record a note, and log it as a warning the first time."""
    entry = Note(source, message)
    with _lock:
        if (source, message) in _notes:
            return
        _notes[source, message] = entry
    _log.warning("%s: %s", source, message)


def notes() -> tuple[Note, ...]:
    """All notes so far, oldest first."""
    with _lock:
        return tuple(_notes.values())
