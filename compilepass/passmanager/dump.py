"""Write what the passes did to a directory, with names that are the same every time.

dump/
  index.md                               what is here
  config.toml  plan.txt  report.txt  report.json
  rules/fuse_norm_quant.py               the patterns and replacements that ran
  graph_0/00_input.py
  graph_0/03_fuse_norm_quant_before.py   only for passes that changed the graph
  graph_0/03_fuse_norm_quant_after.py
  graph_0/99_output.py
  depyf/                                 depyf's view of Dynamo's code, where it could make one
"""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

from torch.fx import Graph

from ..errors import ConfigError
from ..reporting import GraphRecord, Report, note
from .base import FusionPass, Pass, PassContext
from .graph_code import graph_source
from .plan import Plan

__all__ = ["Dump"]

_TITLE = "# What compilepass did\n"
_ABOUT = {
    "config.toml": "the configuration in use",
    "depyf_failed.txt": "why depyf's files are missing or incomplete",
    "plan.txt": "every pass in order, and why it ran or not",
    "report.json": "matches and near misses as data",
    "report.txt": "matches and near misses",
}


class Dump:
    """An instrument that writes graphs below ``path``; one per compiled model.

    What an earlier dump left there is removed. Raises :class:`ConfigError` if nothing can be
    written there; a write that fails later is a note, since it must not break a compile.
    """

    def __init__(self, path: Path, plan: Plan, config_text: str) -> None:
        self.path = path
        self._plan = plan
        self._config = config_text
        self._here = path
        self._before = ""
        self._rules: set[str] = set()
        try:
            path.mkdir(parents=True, exist_ok=True)
            _remove_old(path)
            (path / "index.md").write_text(_TITLE)
        except OSError as error:
            raise ConfigError(
                f"debug_dump_path is {str(path)!r}, and nothing can be written there",
                why=str(error),
                hint="Name a directory that is writable, or none to dump nothing.",
            ) from error

    def begin(self, graph: Graph, ctx: PassContext) -> None:
        self._here = self.path / re.sub(r"\W", "_", ctx.graph)
        for old in self._here.glob("*.py"):
            old.unlink()
        kind = "inference" if ctx.is_inference else "training"
        self._write("00_input", graph, f"The graph before any pass ({kind}, {ctx.device_type}).")
        for pass_ in self._plan.running:
            if isinstance(pass_, FusionPass) and pass_.name not in self._rules:
                self._rules.add(pass_.name)
                self._write_rules(pass_, ctx)

    def before(self, pass_: Pass, graph: Graph) -> None:
        self._before = graph_source(graph, f"Before {pass_.name}.")

    def after(self, pass_: Pass, graph: Graph, changes: int) -> None:
        if not changes:
            return
        stem = self._stem(pass_)
        _put(self._here / f"{stem}_before.py", self._before)
        count = f"{changes} change{'s' * (changes != 1)}"
        self._write(f"{stem}_after", graph, f"After {pass_.name}: {count}.")

    def failed(self, pass_: Pass, graph: Graph, error: Exception) -> str:
        """Write the graph that the pass failed on."""
        path = self._here / f"{self._stem(pass_)}_failed.py"
        _put(path, self._before)
        return str(path)

    def end(self, graph: Graph, record: GraphRecord) -> None:
        self._write("99_output", graph, "The graph after all passes.")

    def finish(self, report: Report) -> None:
        """Write the report, the configuration and the index."""
        for name, text in {
            "config.toml": self._config,
            "plan.txt": str(self._plan) + "\n",
            "report.txt": str(report) + "\n",
            "report.json": report.to_json() + "\n",
        }.items():
            _put(self.path / name, text)
        _put(self.path / "index.md", self._index(report))

    def _stem(self, pass_: Pass) -> str:
        order = [p.name for p in self._plan.running]
        return f"{order.index(pass_.name) + 1:02d}_{pass_.name}"

    def _write(self, stem: str, graph: Graph, title: str) -> None:
        _put(self._here / f"{stem}.py", graph_source(graph, title))

    def _write_rules(self, pass_: FusionPass, ctx: PassContext) -> None:
        parts = [f"# {pass_.name}, from {inspect.getsourcefile(type(pass_)) or 'code'}"]
        for rule in pass_.rules(ctx):
            shapes = {n: getattr(s, "shape", s) for n, s in rule.inputs.items()}
            parts.append(f"# rule {rule}: {shapes}")
            for fn in (rule.pattern, rule.replacement):
                try:
                    parts.append(inspect.getsource(fn))
                except (OSError, TypeError):
                    parts.append(f"# the source of {fn.__name__} is not on disk")
        _put(self.path / "rules" / f"{pass_.name}.py", "\n\n".join(parts) + "\n")

    def _index(self, report: Report) -> str:
        lines = [_TITLE, str(report).splitlines()[0], "", "| file | what it is |", "|---|---|"]
        found = [p for p in self.path.rglob("*") if p.is_file() and p.name != "index.md"]
        for path in sorted(found, key=lambda p: (len(p.relative_to(self.path).parts), p)):
            name = path.relative_to(self.path).as_posix()
            lines.append(f"| [{name}]({name}) | {self._about(name, path)} |")
        return "\n".join(lines) + "\n"

    def _about(self, name: str, path: Path) -> str:
        if name in _ABOUT:
            return _ABOUT[name]
        if name.startswith("depyf/"):
            return "depyf: what Dynamo made of the model"
        with path.open() as file:
            return file.readline().strip().strip('"# ')


def _remove_old(path: Path) -> None:
    index = path / "index.md"
    if not index.exists() or not index.read_text().startswith(_TITLE):
        return  # not a dump: none of these files is ours
    for name in _ABOUT:
        (path / name).unlink(missing_ok=True)
    for folder in (*path.glob("graph_*"), path / "rules", path / "depyf"):
        shutil.rmtree(folder, ignore_errors=True)


def _put(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        note("dump", f"{path.name} cannot be written: {error}")
