"""What ``debug_dump_path`` leaves behind: complete, the same every time, and never in the way."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compilepass as cp
from compilepass import ConfigError
from compilepass.reporting import notes

from .models import AddNorm, Broken, Chain, built, fx_config, inputs


def dumped(path: Path, model: Any, *args: Tensor, **fields: Any) -> list[str]:
    """Compile and call ``model`` with a dump; the names of the files, depyf's left out."""
    fast = cp.compile(model, fx_config(debug_dump_path=path, **fields))
    torch.testing.assert_close(fast(*args), model(*args))
    return files(path)


def files(path: Path) -> list[str]:
    found = [p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()]
    return sorted(f for f in found if not f.startswith("depyf/"))


def outputs_of(source: Path) -> list[Any]:
    """Run a dumped graph on its own inputs."""
    space: dict[str, Any] = {"__name__": "dumped"}
    exec(compile(source.read_text(), str(source), "exec"), space)
    with torch.no_grad():
        return list(space["forward"](*space["inputs"]()))


def same_outputs(before: Path, after: Path) -> None:
    for one, other in zip(outputs_of(before), outputs_of(after), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


RUNNING = cp.plan(fx_config()).running
FUSED = f"graph_0/{[p.name for p in RUNNING].index('fuse_add_rms_norm') + 1:02d}_fuse_add_rms_norm"
BEFORE, AFTER, INPUT = f"{FUSED}_before.py", f"{FUSED}_after.py", "graph_0/00_input.py"
NAMES = sorted(
    [
        "config.toml",
        "index.md",
        "plan.txt",
        "report.json",
        "report.txt",
        INPUT,
        BEFORE,
        AFTER,
        "graph_0/99_output.py",
        *(f"rules/{p.name}.py" for p in RUNNING if isinstance(p, cp.FusionPass)),
    ]
)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dump")
    dumped(path, built(AddNorm), *inputs())
    return path


def test_the_names_are_the_same_every_time(dump: Path, tmp_path: Path) -> None:
    assert files(dump) == NAMES
    assert dumped(tmp_path / "made" / "for us", built(AddNorm), *inputs()) == NAMES


def test_the_content_is_the_same_every_time(dump: Path, tmp_path: Path) -> None:
    dumped(tmp_path, built(AddNorm), *inputs())
    for name in NAMES:
        if name.endswith(".py"):
            assert (tmp_path / name).read_text() == (dump / name).read_text()


def test_the_index_lists_every_file(dump: Path) -> None:
    every = {p.relative_to(dump).as_posix() for p in dump.rglob("*") if p.is_file()}
    index = (dump / "index.md").read_text()
    assert set(re.findall(r"\]\((.+?)\) \| \S", index)) == every - {"index.md"}


def test_the_config_and_the_report_can_be_read_back(dump: Path) -> None:
    assert cp.CompilationConfig.load(dump / "config.toml") == fx_config(debug_dump_path=dump)
    report = cp.Report.from_json((dump / "report.json").read_text())
    assert report.matches["fuse_add_rms_norm"] == 1
    assert (dump / "report.txt").read_text() == f"{report}\n"


def test_the_graphs_show_what_a_pass_did(dump: Path) -> None:
    before = (dump / BEFORE).read_text()
    after = (dump / AFTER).read_text()
    assert "torch.ops.compilepass.fused_add_rms_norm" not in before
    assert "torch.ops.compilepass.fused_add_rms_norm" in after
    assert after.startswith('"""After fuse_add_rms_norm: 1 change."""')
    assert "f32[4, 32]" in after or "float32[4, 32]" in after
    assert "models.py:" in after
    same_outputs(dump / BEFORE, dump / AFTER)


def test_the_rules_are_there_with_their_sources(dump: Path) -> None:
    text = (dump / "rules/fuse_add_rms_norm.py").read_text()
    assert "def add_rms_norm" in text and "native.fused_add_rms_norm" in text
    assert "torch.ops.compilepass.fused_add_rms_norm" in text


def test_depyf_writes_beside_it(dump: Path) -> None:
    assert not (dump / "depyf_failed.txt").exists()
    assert any("full_code" in p.name for p in (dump / "depyf").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", [INPUT, AFTER])
def test_a_graph_file_is_a_program(dump: Path, name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(dump / name)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 (torch.float32, (4, 32))\n"


# Graphs of all kinds


class Constant(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> Any:
        return x + torch.tensor([1.0, float("inf")]).repeat(16), residual * 2


class Aliases(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> Any:
        y = x * residual
        return y, y.view(-1), y[0], x, y.t()


class Choice(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda a, b: a * b, lambda a, b: a - b, (x, residual))


class Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        return self.table(x.long().clamp(0, 6)), x.to(torch.int8), x.shape[0], None


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("make", [AddNorm, Constant, Aliases, Choice, Integers])
def test_every_graph_file_runs_by_itself(tmp_path: Path, make: Any, dynamic: bool | None) -> None:
    names = dumped(tmp_path, built(make), *inputs(), dynamic=dynamic)
    graphs = {n.split("/")[0] for n in names if n.startswith("graph_")}
    assert len(graphs) == (3 if make is Choice else 1)
    for graph in graphs:
        same_outputs(tmp_path / graph / "00_input.py", tmp_path / graph / "99_output.py")


def test_forward_and_backward_graphs_have_folders_and_are_in_the_index(tmp_path: Path) -> None:
    model = built(AddNorm).train().requires_grad_(True)
    fast = cp.compile(model, fx_config(debug_dump_path=tmp_path))
    fast(*inputs()).sum().backward()
    names = files(tmp_path)
    assert {"graph_0/99_output.py", "graph_0_backward/99_output.py"} <= set(names)
    index = (tmp_path / "index.md").read_text()
    assert "graph_0_backward/99_output.py" in index
    assert "2 graphs" in index
    assert "backward" in (tmp_path / "report.json").read_text()
    outputs_of(tmp_path / "graph_0_backward/99_output.py")


def test_a_recompile_writes_over_its_graph(tmp_path: Path) -> None:
    model = built(AddNorm)
    fast = cp.compile(model, fx_config(debug_dump_path=tmp_path))
    for rows in (4, 6):
        fast(*inputs(rows))
    assert files(tmp_path) == NAMES
    assert "s" in (tmp_path / INPUT).read_text().split("[")[1]


# A directory that was used before, or cannot be used


def test_a_second_dump_leaves_no_stale_files(tmp_path: Path) -> None:
    dumped(tmp_path, built(Broken), *inputs())
    (tmp_path / "depyf_failed.txt").write_text("old")
    (tmp_path / "depyf" / "old.py").write_text("old")
    (tmp_path / "notes.txt").write_text("the user's own")
    names = dumped(tmp_path, built(Chain, 1), *inputs(), passes=["none", "+fuse_add_rms_norm"])
    assert [n for n in names if n.startswith(("graph_", "rules"))] == [
        "graph_0/00_input.py",
        "graph_0/02_fuse_add_rms_norm_after.py",
        "graph_0/02_fuse_add_rms_norm_before.py",
        "graph_0/99_output.py",
        "rules/fuse_add_rms_norm.py",
    ]
    assert "notes.txt" in names and "depyf_failed.txt" not in names
    assert not (tmp_path / "depyf" / "old.py").exists()


def test_a_directory_that_is_no_dump_keeps_its_files(tmp_path: Path) -> None:
    (tmp_path / "graph_7").mkdir()
    (tmp_path / "graph_7" / "mine.py").write_text('"""Mine."""')
    assert "graph_7/mine.py" in dumped(tmp_path, built(AddNorm), *inputs())


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="nothing can be written there") as error:
        cp.compile(built(AddNorm), fx_config(debug_dump_path=tmp_path / "file" / "dump"))
    assert "Not a directory" in error.value.why


def test_a_write_that_fails_later_is_a_note(tmp_path: Path) -> None:
    """As when the disk is full: here, a file stands where the graph's folder should be."""
    model, args = built(AddNorm), inputs()
    fast = cp.compile(model, fx_config(debug_dump_path=tmp_path))
    (tmp_path / "graph_0").write_text("in the way")
    torch.testing.assert_close(fast(*args), model(*args))
    assert any(n.source == "dump" and "00_input.py" in n.message for n in notes())
    assert cp.report(fast).matches["fuse_add_rms_norm"] == 1


@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
def test_our_dump_stands_where_depyf_fails(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import depyf

    class Stumbles:
        def __enter__(self) -> None:
            self.fail("__enter__")

        def __exit__(self, *_: object) -> None:
            self.fail("__exit__")

        def fail(self, at: str) -> None:
            if at == where:
                raise RuntimeError(f"depyf stumbled in {at}")

    monkeypatch.setattr(depyf, "prepare_debug", lambda path: Stumbles())
    names = dumped(tmp_path, built(AddNorm), *inputs())
    assert names == sorted([*NAMES, "depyf_failed.txt"])
    assert f"depyf stumbled in {where}" in (tmp_path / "depyf_failed.txt").read_text()
    assert "depyf_failed.txt" in (tmp_path / "index.md").read_text()


def test_an_error_of_the_model_comes_through_and_the_next_call_is_watched(tmp_path: Path) -> None:
    fast = cp.compile(built(AddNorm), fx_config(debug_dump_path=tmp_path))
    with pytest.raises(Exception, match="got x of the shape"):
        fast(torch.randn(4, 3), torch.randn(4, 3))
    fast(*inputs())
    assert "graph_0/99_output.py" in files(tmp_path)
    assert any((tmp_path / "depyf").iterdir())


def test_a_graph_with_a_failed_pass_is_there(tmp_path: Path) -> None:
    class Raises(cp.Pass):
        name = "raises"

        def run(self, graph: Any, ctx: cp.PassContext) -> int:
            raise RuntimeError("no")

    config = fx_config(debug_dump_path=tmp_path, passes=["none", "+raises"])
    config.register_pass(Raises)
    fast = cp.compile(built(AddNorm), config)
    fast(*inputs())
    (failed,) = tmp_path.glob("graph_0/*_failed.py")
    assert any(str(failed) in p.reason for p in cp.report(fast).passes)
    outputs_of(failed)
