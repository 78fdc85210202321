"""The build cache: built once, rebuilt when damaged, shared, and native where it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

PROBE = """
import logging, torch
logging.basicConfig(level=logging.INFO, format="%(message)s")
from compilepass import kernels
from compilepass.reporting import notes
out = torch.ops.compilepass.rms_norm(torch.ones(2, 33), torch.ones(33), 0.0)
assert torch.equal(out, torch.ones(2, 33)), out
print(kernels.find("compilepass::rms_norm").available("cpu"))
print([note.message for note in notes()])
"""
BUILDING = "building the C++ kernels"


def environment(cache: Path, **extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("COMPILEPASS_")}
    return {**clean, "COMPILEPASS_CACHE_DIR": str(cache), **extra}


def start(cache: Path, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROBE],
        env=environment(cache, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


def probe(cache: Path, **extra: str) -> str:
    return finish(start(cache, **extra))


def library(cache: Path) -> Path:
    (built,) = cache.glob("kernels/*/kernels.so")
    return built


@pytest.fixture(scope="module")
def fast_cxx(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that does not optimise, since these tests build often."""
    return str(script(tmp_path_factory.mktemp("bin"), "cxx", 'exec g++ "$@" -O0'))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, fast_cxx: str) -> Path:
    """A cache that two processes filled at once."""
    cache = tmp_path_factory.mktemp("cache")
    both = [start(cache, COMPILEPASS_CXX=fast_cxx) for _ in range(2)]
    outputs = [finish(process) for process in both]
    assert sum(BUILDING in out for out in outputs) == 1
    assert all("ok=True" in out for out in outputs)
    return cache


def test_a_second_process_does_not_build(built: Path, fast_cxx: str) -> None:
    out = probe(built, COMPILEPASS_CXX=fast_cxx)
    assert BUILDING not in out
    assert "ok=True" in out


@pytest.mark.parametrize("damage", ["truncated", "unfinished"])
def test_a_damaged_build_is_made_again(
    built: Path, fast_cxx: str, tmp_path: Path, damage: str
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(built, cache)
    if damage == "truncated":
        library(cache).write_bytes(library(cache).read_bytes()[:4096])
    else:
        (library(cache).parent / "kernels.sha256").unlink()
    out = probe(cache, COMPILEPASS_CXX=fast_cxx)
    assert BUILDING in out
    assert "ok=True" in out


def test_a_killed_build_leaves_no_lock_behind(tmp_path: Path, fast_cxx: str) -> None:
    process = start(tmp_path, COMPILEPASS_CXX=fast_cxx)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("kernels/*/lock")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert "ok=True" in probe(tmp_path, COMPILEPASS_CXX=fast_cxx)


def test_native_runs_and_says_so_without_a_compiler(tmp_path: Path) -> None:
    out = probe(tmp_path, COMPILEPASS_CXX="no-such-compiler")
    assert "no C++ compiler was found (no-such-compiler)" in out
    assert "ok=False" in out


def test_native_runs_and_says_so_when_the_compiler_fails(tmp_path: Path) -> None:
    compiler = script(tmp_path, "cxx", '[ "$1" = --version ] || { echo broken >&2; exit 1; }')
    out = probe(tmp_path, COMPILEPASS_CXX=str(compiler))
    assert "failed" in out
    assert "broken" in out
    assert "ok=False" in out


def test_native_runs_when_cpp_is_switched_off(built: Path) -> None:
    out = probe(built, COMPILEPASS_NO_CPP="1")
    assert "COMPILEPASS_NO_CPP" in out
    assert "ok=False" in out


def test_native_runs_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = probe(tmp_path / "file")
    assert "COMPILEPASS_CACHE_DIR" in out
    assert "ok=False" in out


@pytest.mark.parametrize(
    "flags", ["-mno-avx512f", "-march=x86-64 -Wno-psabi"], ids=["avx2", "portable"]
)
def test_other_instruction_sets_compute_the_same(tmp_path: Path, flags: str) -> None:
    compiler = script(tmp_path, "cxx", f'exec g++ "$@" {flags}')
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            str(Path(__file__).parent / "test_numerics.py"),
        ],
        env=environment(tmp_path / "cache", COMPILEPASS_CXX=str(compiler)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]


def script(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path
