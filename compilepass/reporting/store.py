"""Records of graphs on disk, under the key of the graph, for when a cache hit runs no pass.

Beside the records stand the factors that the key is made of, so that two keys can be compared. A
file that cannot be read counts as absent, and one that cannot be written is only a note: neither
may break a compile.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import cache_dir
from ..errors import ConfigError
from .notes import note
from .records import GraphRecord
from .report import Report

__all__ = [
    "Difference",
    "Identity",
    "Stored",
    "differences",
    "find_stored",
    "load_graphs",
    "save_graphs",
    "stored",
]

_SHORTEST = 4  # of a key that stands for a longer one


@dataclass(frozen=True)
class Identity:
    """What decides how a graph is compiled, by name; equal factors give equal code."""

    factors: Mapping[str, str]

    @functools.cached_property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.factors), sort_keys=True).encode()).hexdigest()

    def with_factors(self, factors: Mapping[str, str]) -> Identity:
        return Identity({**self.factors, **factors})


@dataclass(frozen=True)
class Stored:
    """One graph of the store; ``written`` is in seconds since the epoch."""

    key: str
    identity: Identity
    report: Report
    written: float


@dataclass(frozen=True)
class Difference:
    """A factor in which two graphs differ; ``None`` is where one of them has none of its name."""

    factor: str
    one: str | None
    other: str | None


def load_graphs(identity: Identity) -> tuple[GraphRecord, ...] | None:
    """The records stored for a graph, or ``None``."""
    try:
        return _read(_folder() / f"{identity.key}.json").report.graphs
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        note("reports", f"a stored report is unreadable and is made anew: {error}")
        return None


def save_graphs(identity: Identity, graphs: Sequence[GraphRecord]) -> None:
    """Store ``graphs``, in one step, so that no reader sees half a file."""
    folder = _folder()
    document = {
        "factors": dict(identity.factors),
        "report": Report(graphs=tuple(graphs)).to_dict(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(document, file)
        os.replace(temporary, folder / f"{identity.key}.json")
    except OSError as error:
        note("reports", f"reports cannot be stored in {folder}: {error}")


def stored() -> Iterator[Stored]:
    """All graphs of the store that can be read, the newest first."""
    found = []
    for path in _folder().glob("*.json"):
        try:
            found.append(_read(path))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it is written anew when its graph is compiled again
    yield from sorted(found, key=lambda entry: entry.written, reverse=True)


def find_stored(key: str) -> Stored:
    """The graph whose key begins with ``key``; raises :class:`ConfigError` if not exactly one."""
    if len(key) < _SHORTEST:
        raise ConfigError(
            f"{key!r} is too short for a key", hint=f"Give {_SHORTEST} characters or more."
        )
    found = [entry for entry in stored() if entry.key.startswith(key)]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found) or 'no'} stored graphs have a key that begins with {key!r}",
            why=f"They are those of {_folder()}.",
            hint="`compilepass cache list` shows the keys.",
        )
    return found[0]


def differences(one: Identity, other: Identity) -> list[Difference]:
    """The factors that differ."""
    names = dict.fromkeys([*one.factors, *other.factors])
    pairs = [(name, one.factors.get(name), other.factors.get(name)) for name in names]
    return [Difference(name, a, b) for name, a, b in pairs if a != b]


def _folder() -> Path:
    return cache_dir() / "reports"


def _read(path: Path) -> Stored:
    document = json.loads(path.read_text())
    report = Report.from_json(json.dumps(document["report"]))
    return Stored(path.stem, Identity(document["factors"]), report, path.stat().st_mtime)
