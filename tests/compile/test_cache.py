"""A cache hit runs no pass, and the report is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compilepass.config import cache_dir

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow  # two processes that generate code


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cache")
    (folder / "own").mkdir()
    (folder / "own" / "kernels").symlink_to(cache_dir() / "kernels")
    env = {
        **os.environ,
        "COMPILEPASS_CACHE_DIR": str(folder / "own"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONPATH": str(ROOT),
    }
    found = {}
    for step, seed in (("cold", "1"), ("warm", "2")):
        done = subprocess.run(
            [sys.executable, "-m", "tests.compile.cached", step, str(folder / "dump")],
            env={**env, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found |= {entry["name"]: entry for entry in json.loads(done.stdout.splitlines()[-1])}
    found["dump"]["files"] = sorted(
        p.relative_to(folder / "dump").as_posix() for p in (folder / "dump").rglob("*.*")
    )
    return found


@pytest.mark.parametrize(
    ("name", "passes_ran", "from_cache"),
    [
        ("cold", True, False),
        ("same process", False, True),
        ("warm", False, True),
        ("report gone", True, False),
        ("report made anew", False, True),
        ("report corrupt", True, False),
        ("dump", True, False),
    ],
)
def test_the_report_is_complete(
    observed: dict[str, dict[str, Any]], name: str, passes_ran: bool, from_cache: bool
) -> None:
    found = observed[name]
    assert bool(found["ran"]) is passes_ran
    assert found["from_cache"] is from_cache
    assert found["matches"]["fuse_add_rms_norm"] == 1
    assert (found["graphs"], found["sites"]) == (["graph 0"], 1)
    assert found["ops"] == ["rms_norm"]
    assert found["again"]


def test_the_config_and_notes_are_those_of_the_running_process(
    observed: dict[str, dict[str, Any]],
) -> None:
    assert [n for n, found in observed.items() if found["config"]] == ["warm"]
    assert observed["warm"]["notes"] == observed["report gone"]["notes"] == []


def test_a_corrupt_report_is_told(observed: dict[str, dict[str, Any]]) -> None:
    (note,) = observed["report corrupt"]["notes"]
    assert note.startswith("a stored report is unreadable and is made anew")


def test_a_dump_on_a_warm_cache_has_its_graphs(observed: dict[str, dict[str, Any]]) -> None:
    files = observed["dump"]["files"]
    assert {"graph_0/00_input.py", "graph_0/99_output.py", "index.md"} <= set(files)
    assert any(f.endswith("fuse_add_rms_norm_after.py") for f in files)
