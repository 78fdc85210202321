"""The command ``compilepass coverage``: a matrix of what the passes reach, and why not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from .coverage import Coverage

__all__ = ["coverage"]


def coverage(
    family: Annotated[
        list[str] | None,
        typer.Option(help="A model type of transformers; several times for several."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="fp32, bf16 or fp16; several times for several.")
    ] = None,
    dynamic: Annotated[
        bool | None,
        typer.Option("--dynamic/--static", help="With or without dynamic=True; both by default."),
    ] = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(help="prefill, or decode (one token, with a cache); both by default."),
    ] = None,
    passes: Annotated[
        str | None, typer.Option("--passes", help="The pass policy, such as 'default,-fuse_rope'.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the outputs with eager, against float64.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Count norms, gates and rotary embeddings in models, and how many of them the passes took."""
    from . import CompilationConfig
    from .coverage import FAMILIES, PHASES, cover
    from .models import DTYPES

    chosen = {"--dtype": (dtype, DTYPES), "--phase": (phase, PHASES)}
    for option, (given, known) in chosen.items():
        for word in given or ():
            if word not in known:
                raise typer.BadParameter(
                    f"{word!r} is none of {', '.join(known)}", param_hint=option
                )
    config = CompilationConfig.from_env(None)
    if passes is not None:
        config = config.model_copy(update={"passes": passes})
    cases = [
        {"family": f, "dtype": DTYPES[d], "dynamic": dyn, "phase": p}
        for f in family or FAMILIES
        for d in dtype or ("fp32", "bf16")
        for p in phase or PHASES
        for dyn in ((False, True) if dynamic is None else (dynamic,))
    ]
    found = []
    with _progress(len(cases)) as step:
        for case in cases:
            step(f"{case['family']} {case['phase']}")
            found.append(cover(**case, config=config, check=check))  # type: ignore[arg-type]
    if as_json:
        typer.echo(json.dumps([f.to_dict() for f in found], indent=2))
    else:
        _show(found)
    if any(f.error or f.wrong for f in found):
        raise typer.Exit(1)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Show on stderr how far it is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, emoji=False)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        done = -1

        def step(what: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=what)

        yield step


def _show(found: list[Coverage]) -> None:
    from .sites import KINDS

    table = Table("family", "dtype", "phase", "shapes", *KINDS, "s")
    for f in found:
        cells = [_cell(str(f.sites[k]), f.sites[k].is_whole) for k in KINDS if k in f.sites]
        if f.error:
            cells = [_cell("error", False), "", ""]
        shapes = "dynamic" if f.dynamic else "static"
        table.add_row(f.family, f.dtype, f.phase, shapes, *cells, f"{f.seconds:.1f}")
    out = Console(emoji=False)
    out.print(table)
    told: dict[str, list[str]] = {}
    for f in found:
        for text in (*map(str, f.near_misses), *f.wrong, f.error):
            if text:
                told.setdefault(text, []).append(f"{f.family} {f.dtype} {f.phase}")
    for text, where in told.items():
        out.rule(escape(", ".join(dict.fromkeys(where))), align="left")
        out.print(escape(text), highlight=False)
    totals = ", ".join(
        f"{k} {sum(f.sites[k].matched for f in found if k in f.sites)}"
        f" of {sum(f.sites[k].candidates for f in found if k in f.sites)}"
        for k in KINDS
    )
    out.print(f"{len(found)} models: {totals}", highlight=False)


def _cell(text: str, good: bool) -> str:
    return text if good else f"[red]{escape(text)}[/red]"
