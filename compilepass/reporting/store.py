"""Records of graphs on disk, under the key of the graph, for when a cache hit runs no pass.

A file that cannot be read counts as absent, and one that cannot be written is only a note: neither
may break a compile.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from ..config import cache_dir
from .notes import note
from .records import GraphRecord
from .report import Report

__all__ = ["load_graphs", "save_graphs"]


def load_graphs(key: str) -> tuple[GraphRecord, ...] | None:
    """The records stored under ``key``, or ``None``."""
    try:
        text = (cache_dir() / "reports" / f"{key}.json").read_text()
        return Report.from_json(text).graphs
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        note("reports", f"a stored report is unreadable and is made anew: {error}")
        return None


def save_graphs(key: str, graphs: Sequence[GraphRecord]) -> None:
    """Store ``graphs`` under ``key``, in one step, so that no reader sees half a file."""
    folder = cache_dir() / "reports"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(Report(graphs=tuple(graphs)).to_json(indent=None))
        os.replace(temporary, folder / f"{key}.json")
    except OSError as error:
        note("reports", f"reports cannot be stored in {folder}: {error}")
