"""Run a model under one policy: build it, compile it, compare it with float64, and time it.

This is what ``compilepass run`` does for each ``--custom-ops``. The three variants that are
compared are also those that are timed, in turn, under ``torch.no_grad()``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from .comparison import Comparison, compare
from .compile import plan
from .config import CompilationConfig, use_config
from .models import Target, build
from .ops import check_policy_names
from .reporting.text import render
from .timing import interleaved_minima

__all__ = ["Trial", "render_summary", "render_trial", "run_trial"]


@dataclass(frozen=True)
class Trial:
    """One run: the configuration, what was found, and each variant's shortest time in seconds."""

    config: CompilationConfig
    comparison: Comparison
    seconds: dict[str, float]
    repeats: int
    threads: int

    @property
    def policy(self) -> str:
        return ",".join(self.config.custom_ops) or "default policy"

    @property
    def speedup(self) -> float:
        """How many times as fast the passes make compiled code."""
        found = self.comparison
        return self.seconds[found.unfused.name] / self.seconds[found.fused.name]

    def to_dict(self, factor: float) -> dict[str, Any]:
        """Plain data for JSON; ``factor`` is the bound that ``ok`` is judged by."""
        found, dump = self.comparison, self.config.debug_dump_path
        return {
            "policy": self.policy,
            "ok": found.ok(factor),
            "failures": list(found.failures(factor)),
            "errors": {v.name: [dataclasses.asdict(e) for e in v.errors] for v in found.variants},
            "seconds": self.seconds,
            "speedup": self.speedup,
            "repeats": self.repeats,
            "threads": self.threads,
            "dump": str(dump) if dump else None,
            "report": found.report.to_dict(),
        }


def run_trial(
    target: Target, config: CompilationConfig, repeats: int, on_stage: Callable[[str], None]
) -> Trial:
    """Build ``target`` under ``config`` and run it; ``on_stage`` is told what happens next.

    Raises what :func:`build` and :func:`compare` raise.
    """
    plan(config)  # says what is wrong with the passes before anything takes time
    on_stage(f"building {target.where}")
    with use_config(config):
        model, inputs = build(target)
        check_policy_names(config)  # the target's module may have registered ops
        found = compare(model, inputs, config, on_stage=on_stage)
        on_stage("timing")
        with torch.no_grad():
            seconds = interleaved_minima({v.name: v.run for v in found.variants}, repeats)
    return Trial(config, found, seconds, repeats, torch.get_num_threads())


def render_trial(trial: Trial, factor: float) -> Iterator[RenderableType]:
    """The report, the errors, the times and the dump of one trial."""
    found = trial.comparison
    yield from render(found.report)
    yield found.table()
    for failure in found.failures(factor):
        yield f"[red]out of bound[/red] {escape(failure)}"
    plural = "s" * (trial.threads != 1)
    yield f"Time: the minimum of {trial.repeats} runs in turn, on {trial.threads} thread{plural}"
    yield _times(trial)
    if trial.config.debug_dump_path is not None:
        yield f"Dump: {escape(str(trial.config.debug_dump_path / 'index.md'))}"


def render_summary(trials: Sequence[Trial]) -> RenderableType:
    """How often each pass that fuses matched under each policy."""
    table = Table(title="Matches by policy", title_justify="left", box=None)
    table.add_column("")
    for trial in trials:
        table.add_column(escape(trial.policy), justify="right")
    graphs = [g for t in trials for g in t.comparison.report.graphs]
    for name in dict.fromkeys(p.name for g in graphs for p in g.passes if p.rules):
        counts = [t.comparison.report.matches.get(name, 0) for t in trials]
        table.add_row(name, *map(str, counts))
    speedups = [f"{trial.speedup:.2f}x" for trial in trials]
    table.add_row(f"against {trials[0].comparison.unfused.name}", *speedups)
    return table


def _times(trial: Trial) -> Table:
    table = Table(box=None)
    table.add_column("")
    table.add_column("ms", justify="right")
    fused = trial.comparison.fused.name
    table.add_column(f"time / {fused}", justify="right")
    for name, seconds in trial.seconds.items():
        ratio = seconds / trial.seconds[fused]
        table.add_row(name, f"{seconds * 1e3:.3f}", f"{ratio:.2f}")
    return table
