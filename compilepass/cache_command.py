"""The commands ``compilepass cache``: the graphs whose reports are kept, and why two differ.

Torch is imported when a command runs, as in :mod:`compilepass.cli`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .reporting.store import Stored

__all__ = ["cache"]

cache = typer.Typer(
    name="cache",
    help="The compiled graphs whose reports are kept, and what decides whether one is found again.",
    no_args_is_help=True,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
_KEY = 12  # characters of a key that are shown


@cache.command("list")
def list_(
    limit: Annotated[int, typer.Option(min=1, help="Show so many, the newest first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the compiled graphs, the newest first."""
    from .reporting.store import stored

    entries = list(stored())
    if as_json:
        _print_json([_summary(entry) for entry in entries[:limit]])
        return
    table = Table("key", "written", "graphs", "device", "matches", box=None, pad_edge=False)
    for entry in entries[:limit]:
        shown = _summary(entry)
        matches = ", ".join(f"{name} {n}" for name, n in shown["matches"].items())
        table.add_row(
            shown["key"][:_KEY],
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.written)),
            ", ".join(shown["graphs"]),
            shown["device"],
            escape(matches) or "none",
        )
    _console().print(table if entries else "No graph is stored.")
    if len(entries) > limit:
        _console().print(f"{len(entries) - limit} older ones are not shown; see --limit.")


@cache.command()
def explain(
    one: Annotated[str, typer.Argument(metavar="A", help="The first characters of a key.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Those of another key.")],
    as_json: JsonOption = False,
) -> None:
    """Name what differs between two compiled graphs, so that one was not found for the other."""
    from .reporting.store import differences, find_stored

    found = differences(find_stored(one).identity, find_stored(other).identity)
    if as_json:
        _print_json([dataclasses.asdict(difference) for difference in found])
        return
    if not found:
        _console().print("They are one graph: nothing differs.")
        return
    table = Table("factor", "A", "B", box=None, pad_edge=False)
    for difference in found:
        sides = (difference.one, difference.other)
        table.add_row(escape(difference.factor), *(escape(s or "absent") for s in sides))
    _console().print(table)


@cache.command()
def clear() -> None:
    """Remove the stored reports; built kernels and Inductor's own cache stay.

    A graph that Inductor still has is compiled again once, for its report.
    """
    from .config import cache_dir

    folder = cache_dir() / "reports"
    count = len(list(folder.glob("*.json"))) if folder.is_dir() else 0
    if folder.is_dir():
        shutil.rmtree(folder)
    _console().print(f"Removed the reports of {count} graphs from {escape(str(folder))}.")


def _summary(entry: Stored) -> dict[str, Any]:
    return {
        "key": entry.key,
        "written": entry.written,
        "graphs": [graph.name for graph in entry.report.graphs],
        "device": entry.identity.factors.get("platform", ""),
        "torch": entry.identity.factors.get("torch", ""),
        "matches": {name: n for name, n in entry.report.matches.items() if n},
    }


def _console() -> Console:
    return Console(emoji=False, highlight=False, soft_wrap=True)


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))
