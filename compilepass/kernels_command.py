"""The command ``compilepass kernels``: list the kernels of this machine, or verify them.

Torch is imported when the command runs, as in :mod:`compilepass.cli`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .kernels import KernelOp, Provider
    from .kernels.listing import Listed
    from .kernels.verify import Record

__all__ = ["kernels"]

_COLOURS = {"runs": "green", "next": "cyan", "idle": "", "absent": "dim"}


def kernels(
    verify: Annotated[
        bool, typer.Option("--verify", help="Check what each available provider computes.")
    ] = False,
    op: Annotated[
        list[str] | None,
        typer.Option(help="Only this op, such as rms_norm or my_package::mine; may be repeated."),
    ] = None,
    provider: Annotated[
        list[str] | None, typer.Option(help="Only this provider, such as cpp; may be repeated.")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="Only on this device, such as cuda; may be repeated.")
    ] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="Import this module, which registers kernels, first."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> None:
    """Say of every op which kernel runs here and why each other one does not, or verify them."""
    ops = _ops(op or [], imports or [])
    if not verify:
        _list(ops, _Filter(provider or [], device or []), as_json)
        return
    records = []
    with _progress() as show:
        for record in _verified(ops, _Filter(provider or [], device or [])):
            show(f"{record.op}, {record.provider}: {record.outcome.check}")
            records.append(record)
    failures = [record for record in records if not record.ok]
    if as_json:
        _print_json({"ok": not failures, "records": [r.to_dict() for r in records]})
    else:
        console = _console()
        console.print(_summary(records))
        for part in _failures(failures):
            console.print(part)
    if failures:
        raise typer.Exit(1)


class _Filter(NamedTuple):
    """The providers and devices that were asked for; none is all of them."""

    providers: list[str]
    devices: list[str]

    def takes(self, provider: str, device: str) -> bool:
        return (not self.providers or provider in self.providers) and (
            not self.devices or device in self.devices
        )


def _ops(names: list[str], imports: list[str]) -> list[KernelOp]:
    import importlib

    from .errors import KernelError, did_you_mean
    from .kernels import find, kernel_ops
    from .kernels.registry import load_plugins

    sys.path.insert(0, "")  # as in `python -m`: a module beside the caller
    for module in imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise KernelError(
                f"{module}, which --import names, cannot be imported.", why=str(error)
            ) from error
    load_plugins()
    if not names:
        return list(kernel_ops().values())
    ops = []
    for name in names:
        full = name if "::" in name else f"compilepass::{name}"
        known = find(full)
        if known is None:
            shown = [n.removeprefix("compilepass::") for n in kernel_ops()]
            hint = did_you_mean(name, [*shown, *kernel_ops()])
            raise KernelError(f"{name} is not a known kernel.", hint=hint)
        ops.append(known)
    return ops


def _list(ops: list[KernelOp], wanted: _Filter, as_json: bool) -> None:
    from .kernels.listing import listed

    rows = [row for op in ops for row in listed(op) if wanted.takes(row.provider, row.device)]
    if as_json:
        _print_json([asdict(row) for row in rows])
        return
    console = _console()
    for device in dict.fromkeys(row.device for row in rows):
        console.print(_listing(device, [row for row in rows if row.device == device]))


def _listing(device: str, rows: list[Listed]) -> Table:
    table = Table(title=f"Kernels for {device}", title_justify="left", box=None)
    for heading in ("op", "provider", "priority", "state", "why"):
        table.add_column(heading, justify="right" if heading == "priority" else "left")
    before = ""
    for row in rows:
        colour = _COLOURS[row.state]
        state = f"[{colour}]{row.state}[/{colour}]" if colour else row.state
        priority = "" if row.priority is None else str(row.priority)
        name = "" if row.op == before else _short(row.op)
        table.add_row(escape(name), escape(row.provider), priority, state, escape(row.reason))
        before = row.op
    return table


def _verified(ops: list[KernelOp], wanted: _Filter) -> Iterator[Record]:
    from .errors import KernelError, did_you_mean
    from .kernels.examples import examples_of
    from .kernels.verify import verifiable, verify_all

    known = {p.name for op in ops for p in op.providers}
    for name in wanted.providers:
        if name not in known:
            hint = did_you_mean(name, sorted(known))
            raise KernelError(f"No op has a provider {name!r}.", hint=hint)
    chosen: list[Provider] = []
    for op in ops:
        if not examples_of(op.name) and len(ops) > 1:
            typer.echo(f"{op.name} is left out: it has no examples", err=True)
            continue
        chosen += [p for p in verifiable(op) if wanted.takes(p.name, p.device_type)]
    if not chosen:
        for op in ops:
            for p in op.providers:
                if wanted.takes(p.name, p.device_type):
                    verifiable(op, p.name)  # raises, and says why it cannot run
        raise KernelError("There is no kernel to verify.", hint="See: compilepass kernels")
    yield from verify_all(chosen)


def _summary(records: list[Record]) -> Table:
    from .kernels.checks import CHECKS

    table = Table(title="Verified", title_justify="left", box=None)
    for heading in ("op", "device", "provider", *CHECKS):
        table.add_column(heading)
    for heading in ("calls", "declined", "worst error"):
        table.add_column(heading, justify="right")
    by_provider: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        key = (record.op, record.device, record.provider)
        by_provider.setdefault(key, []).append(record)
    for (op, device, provider), found in by_provider.items():
        outcomes = [record.outcome for record in found]
        worst = max((o.worst for o in outcomes if o.worst is not None), default=None)
        table.add_row(
            escape(_short(op)),
            device,
            escape(provider),
            *(_verdict([r for r in found if r.outcome.check == check]) for check in CHECKS),
            str(sum(o.calls for o in outcomes)),
            str(sum(o.declined for o in outcomes)),
            "" if worst is None else f"{worst:.2f}",
        )
    return table


def _verdict(records: list[Record]) -> str:
    if not records:
        return ""
    if not all(record.ok for record in records):
        return "[red]FAILED[/red]"
    return "[green]ok[/green]" if any(r.outcome.calls for r in records) else "declined"


def _failures(failures: list[Record]) -> Iterator[RenderableType]:
    if not failures:
        return
    table = Table(title="What is wrong", title_justify="left", box=None)
    for heading in ("op", "provider", "check", "first call that shows it"):
        table.add_column(heading, overflow="fold")
    for r in failures:
        table.add_row(
            escape(_short(r.op)), escape(r.provider), r.outcome.check, escape(r.outcome.problem)
        )
    yield ""
    yield table


def _short(op: str) -> str:
    return op.removeprefix("compilepass::")


def _console() -> Console:
    # rich takes 80 columns where there is no terminal, which would fold every table
    return Console(width=None if sys.stdout.isatty() else 120, emoji=False)


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A line on stderr that says what is checked, where there is a terminal."""
    console = Console(stderr=True, emoji=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda what: status.update(escape(what))


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))
