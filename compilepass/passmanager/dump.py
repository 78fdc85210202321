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
from pathlib import Path

from torch.fx import Graph

from ..reporting import GraphRecord, Report
from .base import FusionPass, Pass, PassContext
from .graph_code import graph_source
from .plan import Plan

__all__ = ["Dump"]


class Dump:
    """An instrument that writes graphs below ``path``; one per compiled model."""

    def __init__(self, path: Path, plan: Plan, config_text: str) -> None:
        self.path = path
        self._plan = plan
        self._config = config_text
        self._graphs = 0
        self._here = path
        self._before = ""
        self._rules: set[str] = set()

    def begin(self, graph: Graph, ctx: PassContext) -> None:
        self._here = self.path / f"graph_{self._graphs}"
        self._graphs += 1
        self._here.mkdir(parents=True, exist_ok=True)
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
        (self._here / f"{stem}_before.py").write_text(self._before)
        count = f"{changes} change{'s' * (changes != 1)}"
        self._write(f"{stem}_after", graph, f"After {pass_.name}: {count}.")

    def failed(self, pass_: Pass, graph: Graph, error: Exception) -> str:
        """Write the graph that the pass failed on, with code that runs the pass on it."""
        path = self._here / f"{self._stem(pass_)}_failed.py"
        path.write_text(self._before)
        return str(path)

    def end(self, graph: Graph, record: GraphRecord) -> None:
        self._write("99_output", graph, "The graph after all passes.")

    def finish(self, report: Report) -> None:
        """Write the report, the configuration and the index."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name, text in {
            "config.toml": self._config,
            "plan.txt": str(self._plan) + "\n",
            "report.txt": str(report) + "\n",
            "report.json": report.to_json() + "\n",
        }.items():
            (self.path / name).write_text(text)
        (self.path / "index.md").write_text(self._index(report))

    def _stem(self, pass_: Pass) -> str:
        order = [p.name for p in self._plan.running]
        return f"{order.index(pass_.name) + 1:02d}_{pass_.name}"

    def _write(self, stem: str, graph: Graph, title: str) -> None:
        (self._here / f"{stem}.py").write_text(graph_source(graph, title))

    def _write_rules(self, pass_: FusionPass, ctx: PassContext) -> None:
        folder = self.path / "rules"
        folder.mkdir(parents=True, exist_ok=True)
        parts = [f"# {pass_.name}, from {inspect.getsourcefile(type(pass_)) or 'code'}"]
        for rule in pass_.rules(ctx):
            shapes = {n: getattr(s, "shape", s) for n, s in rule.inputs.items()}
            parts.append(f"# rule {rule}: {shapes}")
            for fn in (rule.pattern, rule.replacement):
                try:
                    parts.append(inspect.getsource(fn))
                except (OSError, TypeError):
                    parts.append(f"# the source of {fn.__name__} is not on disk")
        (folder / f"{pass_.name}.py").write_text("\n\n".join(parts))

    def _index(self, report: Report) -> str:
        lines = [
            "# What compilepass did",
            "",
            str(report).splitlines()[0],
            "",
            "| file | what it is |",
        ]
        lines.append("|---|---|")
        about = {
            "config.toml": "the configuration in use",
            "plan.txt": "every pass in order, and why it ran or not",
            "report.txt": "matches and near misses",
            "report.json": "the same as data",
        }
        lines += [f"| [{name}]({name}) | {text} |" for name, text in about.items()]
        for path in sorted(self.path.glob("graph_*/*.py")) + sorted(self.path.glob("rules/*.py")):
            title = path.read_text().split("\n", 1)[0].strip('"# ')
            name = path.relative_to(self.path).as_posix()
            lines.append(f"| [{name}]({name}) | {title} |")
        depyf = sorted(p.name for p in (self.path / "depyf").glob("*") if p.is_file())
        if depyf:
            lines.append(f"| [depyf/](depyf/) | depyf's decompiled code, {len(depyf)} files |")
        for name in ("depyf_failed.txt",):
            if (self.path / name).exists():
                lines.append(f"| [{name}]({name}) | why depyf's files are missing or incomplete |")
        return "\n".join(lines) + "\n"
