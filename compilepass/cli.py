"""The command line: ``compilepass run``, ``ops``, ``plan``, ``coverage``, ``kernels``, ``cache``.

Exit codes: 0 all is well, 1 a check failed, 2 the command or the configuration is wrong, 130
interrupted. Torch is imported by the commands, so that ``--help`` and usage errors are quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from .cache_command import cache
from .coverage_command import coverage
from .errors import CompilePassError, ExpectationError
from .kernels_command import kernels

if TYPE_CHECKING:
    from .config import CompilationConfig

__all__ = ["app", "main"]

_PROGRESS = Console(stderr=True, emoji=False)


class _Commands(TyperGroup):
    """Errors of ours become a message and an exit code, for every command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except CompilePassError as error:
            _PROGRESS.print(f"[red]error[/red] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1 if isinstance(error, ExpectationError) else 2) from None


app = typer.Typer(
    name="compilepass",
    cls=_Commands,
    help="Native code or a kernel for each operation of a model: decide, compile, explain.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="A .toml or .json file, or a pyproject.toml.")
]
OpsOption = Annotated[
    str | None, typer.Option("--custom-ops", help="The op policy, such as 'none,+rms_norm'.")
]
PassesOption = Annotated[
    str | None, typer.Option("--passes", help="The pass policy, such as 'default,-fuse_act_quant'.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@app.command()
def run(
    target: Annotated[
        str,
        typer.Argument(
            help="hf:MODEL_TYPE (random weights), module:function or file.py:function; a function "
            "returns (model, inputs)."
        ),
    ],
    config: ConfigOption = None,
    custom_ops: Annotated[
        list[str] | None,
        typer.Option(help="The op policy; given several times, the target runs under each."),
    ] = None,
    passes: PassesOption = None,
    backend: Annotated[
        str | None, typer.Option(help="'inductor', or 'fx' to generate no code.")
    ] = None,
    dynamic: Annotated[
        bool | None, typer.Option("--dynamic/--static", help="As in torch.compile.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the input.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of the input.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value, for the model's config or the function."),
    ] = None,
    dump: Annotated[
        Path | None, typer.Option(help="Write each pass's graphs and the report here.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each variant.")] = 10,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    factor: Annotated[
        float, typer.Option(help="How many times the unfused error the fused one may be.")
    ] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Compile a model, say what the passes did, check it against float64, and time it."""
    options = {"passes": passes, "backend": backend, "dynamic": dynamic}
    policies: list[str | None] = list(custom_ops or []) or [None]
    configs = []
    for policy in policies:
        place = dump / _file_name(policy) if dump and policy and len(policies) > 1 else dump
        configs.append(_config(config, {**options, "custom_ops": policy, "debug_dump_path": place}))
    import torch

    from .models import DTYPES, Target, parse_settings
    from .trial import render_summary, render_trial, run_trial

    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}", param_hint="--dtype")
    if threads is not None:
        torch.set_num_threads(threads)
    what = Target(
        target, parse_settings(settings or []), DTYPES[dtype] if dtype else None, tokens, batch
    )
    trials = []
    out = _console()
    for one in configs:
        with _stages() as on_stage, _stdout_to_stderr(as_json):
            trials.append(run_trial(what, one, repeats, on_stage))
        if not as_json:
            out.rule(f"{escape(target)}: {escape(trials[-1].policy)}")
            for part in render_trial(trials[-1], factor):
                out.print(part)
    ok = all(t.comparison.ok(factor) for t in trials)
    if as_json:
        runs = [t.to_dict(factor) for t in trials]
        _print_json({"target": target, "torch": torch.__version__, "ok": ok, "runs": runs})
    elif len(trials) > 1:
        out.rule()
        out.print(render_summary(trials))
    if not ok:
        raise typer.Exit(1)


@app.command()
def ops(
    config: ConfigOption = None, custom_ops: OpsOption = None, as_json: JsonOption = False
) -> None:
    """Say of every op which implementation runs, and why each other one does not."""
    active = _config(config, {"custom_ops": custom_ops})
    from .config import use_config
    from .ops import CustomOp, check_policy_names, describe, op_registry

    check_policy_names(active)
    classes = [c for _, c in sorted(op_registry.items()) if issubclass(c, CustomOp)]
    with use_config(active):
        described = [describe(c) for c in classes]
    if as_json:
        _print_json([{**dataclasses.asdict(d), "others": dict(d.others)} for d in described])
        return
    typer.echo("\n\n".join(map(str, described)))


@app.command()
def plan(
    config: ConfigOption = None, passes: PassesOption = None, as_json: JsonOption = False
) -> None:
    """Print every pass in the order of the plan, with the reason why it runs or not."""
    active = _config(config, {"passes": passes})
    from .compile import plan as plan_of

    made = plan_of(active)
    if not as_json:
        typer.echo(str(made))
        return
    _print_json(
        [
            {
                "name": e.name,
                "phase": e.pass_.phase.name.lower(),
                "state": e.state,
                "reason": e.reason,
                "origin": e.origin,
            }
            for e in made.entries
        ]
    )


app.command()(coverage)
app.command()(kernels)
app.add_typer(cache)


def main() -> None:
    """The console script."""
    app()


def _config(path: Path | None, options: dict[str, Any]) -> CompilationConfig:
    """The file's configuration, changed by the environment, changed by the options given."""
    from . import CompilationConfig

    base = CompilationConfig.load(path) if path is not None else None
    given = {name: value for name, value in options.items() if value is not None}
    return CompilationConfig.from_env(base).model_copy(update=given)


def _file_name(policy: str) -> str:
    return policy.replace(",", "_").replace("+", "")


def _console() -> Console:
    # rich takes 80 columns where there is no terminal, which would fold every table
    width = None if sys.stdout.isatty() else 120
    return Console(width=width, emoji=False)


@contextlib.contextmanager
def _stages() -> Iterator[Callable[[str], None]]:
    """Show on stderr what goes on: a spinner on a terminal, else one line for each stage."""
    if not _PROGRESS.is_terminal:
        yield lambda stage: _PROGRESS.print(f"{stage} …", markup=False, highlight=False)
        return
    with _PROGRESS.status("") as status:
        yield lambda stage: status.update(f"{escape(stage)} …")


@contextlib.contextmanager
def _stdout_to_stderr(wanted: bool) -> Iterator[None]:
    """Keep what a model prints out of a JSON document."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2, default=str))
