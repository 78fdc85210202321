"""Run in processes of their own, with one Inductor cache: what is told when no pass runs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import compilepass as cp
from compilepass.config import cache_dir
from tests.compile.models import AddNorm, built, inputs

ran: list[str] = []


class Watch(cp.Pass):
    """Says when passes run."""

    name = "watch"

    def run(self, graph: Any, ctx: cp.PassContext) -> int:
        ran.append(ctx.graph)
        return 0


def observe(name: str, **fields: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    ran.clear()
    config = cp.CompilationConfig(custom_ops=["none"], passes=["-fuse_linear"], **fields)
    config.register_pass(Watch)
    model, args = built(AddNorm), inputs()
    fast = cp.compile(model, config)
    torch.testing.assert_close(fast(*args), model(*args))
    report = cp.report(fast)
    return {
        "name": name,
        "ran": list(ran),
        "from_cache": report.from_cache,
        "matches": report.matches,
        "graphs": [g.name for g in report.graphs],
        "sites": len(report.sites),
        "ops": [op.name for op in report.ops],
        "notes": [n.message for n in report.notes if n.source == "reports"],
        "config": "strict = true" in report.config,
        "again": fast(*args).shape == (4, 32) and cp.report(fast).graphs != (),
    }


def main(step: str, dump: Path) -> list[dict[str, Any]]:
    reports = cache_dir() / "reports"
    if step == "cold":
        return [observe("cold"), observe("same process")]
    found = [observe("warm", strict=True)]
    shutil.rmtree(reports)
    found.append(observe("report gone"))
    found.append(observe("report made anew"))
    for path in reports.glob("*.json"):
        path.write_text('{"graphs": 7')
    found.append(observe("report corrupt"))
    found.append(observe("dump", debug_dump_path=dump))
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
