"""What a user installs: a wheel in a clean environment, away from the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, since a build leaves folders behind in its source."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("compilepass", "passes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source])
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and, behind it, the packages that are here.

    A path in a ``.pth`` file adds the packages of that folder but runs none of its ``.pth`` files,
    so the editable installation of the tree does not come along.
    """
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False)
    interpreter = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", interpreter]
    run([*pip, "install", "--no-deps", "--no-index", "--quiet", wheel])
    (site,) = home.glob("lib/python*/site-packages")
    others = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    (site / "others.pth").write_text("".join(f"{p}\n" for p in others))
    return interpreter


def run(command: list[str | Path], cwd: Path | None = None) -> str:
    """Run a command without the variables that could lead it back to the tree."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COMPILEPASS_"))}
    for kept in ("COMPILEPASS_CACHE_DIR", "COMPILEPASS_CXX", "COMPILEPASS_NO_CPP"):
        if kept in os.environ:
            env[kept] = os.environ[kept]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def sources(folder: str, *patterns: str) -> set[str]:
    found = (p for pattern in patterns for p in (ROOT / folder).rglob(pattern))
    return {p.relative_to(ROOT / folder).as_posix() for p in found}


def test_the_wheel_holds_the_whole_tree(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"compilepass/{n}" for n in sources("compilepass", "*.py", "*.cpp", "*.h")}
    wanted |= {f"compilepass/passes/{n}" for n in sources("passes", "*.py")}
    assert wanted - names == set(), "list new packages in pyproject.toml"
    assert "compilepass/py.typed" in names
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"compilepass"}


def test_the_wheel_is_what_is_imported(python: Path, tmp_path: Path) -> None:
    where = run(
        [python, "-c", "import compilepass, compilepass.passes as p; print(p.__file__)"], tmp_path
    )
    site = next((python.parents[1]).glob("lib/python*/site-packages"))
    assert Path(where.strip()) == site / "compilepass" / "passes" / "__init__.py"


def test_there_is_no_top_level_passes(python: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u; print(u.find_spec('passes'))"
    assert run([python, "-c", code], tmp_path).strip() == "None"


KERNEL = """
import torch, compilepass
from compilepass.kernels import find, native

x, weight = torch.randn(3, 64), torch.randn(64)
out = torch.ops.compilepass.rms_norm(x, weight, 1e-6)
torch.testing.assert_close(out, native.rms_norm(x, weight, 1e-6))
print(find("compilepass::rms_norm").available("cpu"))
"""


@pytest.mark.skipif(
    not any(shutil.which(c) for c in ("c++", "g++", "clang++")), reason="no C++ compiler"
)
@pytest.mark.skipif("COMPILEPASS_NO_CPP" in os.environ, reason="C++ is switched off")
def test_a_fused_kernel_is_built_from_the_wheels_sources(python: Path, tmp_path: Path) -> None:
    assert run([python, "-c", KERNEL], tmp_path).startswith("Availability(ok=True, provider='cpp'")


BY_NAME = """
import sys, torch
from torch import nn

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x, residual):
        x = x + residual
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype), x

model = Norm().requires_grad_(False)
x, residual = torch.randn(2, 4, 64)
assert "compilepass" not in sys.modules
fast = torch.compile(model, backend="compilepass", options={"backend": "fx"})
torch.testing.assert_close(fast(x, residual), model(x, residual))

import compilepass
print(compilepass.report().matches["fuse_add_rms_norm"])
"""


def test_torch_compile_finds_the_backend_by_its_name(python: Path, tmp_path: Path) -> None:
    """Through the entry point alone: the process has not imported the toolkit before."""
    assert run([python, "-c", BY_NAME], tmp_path).strip() == "1"
