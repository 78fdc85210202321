"""Imports run downwards only, and private names of torch stay where they belong.

The imports of every module are read from its source: top-level, relative, inside functions (lazy
ones count: a cycle that is put off is still a cycle) and under ``TYPE_CHECKING`` alike.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: From the bottom to the top. A unit (a module or a package of ``compilepass``) may import the
#: units of lower levels, and its own modules; units of one level do not import one another.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "torch_compat"),
    ("config_files", "policy"),
    ("config",),
    ("plugins",),
    ("platforms",),
    ("reporting",),
    ("kernels",),
    ("ops", "rewrite"),
    ("layers", "passmanager"),
    ("inductor", "depyf_dump", "quantize"),
    ("compile", "merge"),
    ("__init__",),
    ("timing", "models", "oracle", "sites"),
    ("comparison",),
    ("cache_command", "coverage", "kernels_command", "testing", "trial"),
    ("coverage_command", "pytest_plugin"),
    ("cli",),
    ("__main__",),
)

#: What ``passes/`` may use of the toolkit, besides the names of ``compilepass`` itself.
PUBLIC = re.compile(r"compilepass(\.(kernels|layers|ops|platforms|reporting|rewrite))?")
#: What only the module that touches Inductor's private names can do, for any package's passes.
ALSO_PUBLIC = {("compilepass.inductor", ("defunctionalize",))}

#: Private packages of torch, and the modules that may name them.
PRIVATE_TORCH = re.compile(r"torch\._(inductor|dynamo|functorch)\b")
PRIVATE_TORCH_ALLOWED = ("compilepass.inductor", "compilepass.torch_compat")


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, with the line that imports it and the names it takes."""

    module: str
    line: int
    names: tuple[str, ...] = ()


def imports(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Every import in ``source``, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            if not node.level:
                yield Import(node.module or "", node.lineno, names)
                continue
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = package[: len(package) - node.level + 1]
            yield Import(".".join([*base, *filter(None, [node.module])]), node.lineno, names)


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module of ``compilepass`` imports against the levels, one sentence each."""
    problems = []
    mine = unit(module)
    for found in imports(source, module, is_package):
        for target in targets(found):
            theirs = unit(target)
            if theirs == mine or (theirs == "__init__" and mine in ("cli", "__main__")):
                continue
            if (mine, theirs) == ("__init__", "testing"):
                continue  # the attribute, imported when it is asked for
            if level(theirs) >= level(mine):
                problems.append(
                    f"{module}, line {found.line}: imports {target}, but {theirs!r} is not below "
                    f"{mine!r}"
                )
    return problems


def targets(found: Import) -> list[str]:
    """The modules of ours that an import reaches: ``from . import config`` reaches ``config``."""
    if found.module == "compilepass.passes" or found.module.startswith("compilepass.passes."):
        return [found.module]
    if found.module == "compilepass":
        inside = [name for name in found.names if is_unit(name)]
        rest = [n for n in found.names if n not in inside]
        here = [] if found.names and not rest else ["compilepass"]
        return [*here, *(f"compilepass.{name}" for name in inside)]
    return [found.module] if found.module.startswith("compilepass.") else []


def unit(module: str) -> str:
    """Where a module stands in the layout: ``rewrite`` for ``compilepass.rewrite.term``."""
    return module.split(".")[1] if "." in module else "__init__"


def is_unit(name: str) -> bool:
    return any(name in units for units in LEVELS) and name not in ("compile",)


def level(name: str) -> int:
    for number, units in enumerate(LEVELS):
        if name in units:
            return number
    if name == "passes":
        return len(LEVELS)  # above everything: the toolkit never imports it
    raise LookupError(
        f"compilepass/{name} has no place in the layout. Put it into LEVELS in "
        f"{Path(__file__).name}, above all that it imports and below all that import it."
    )


def modules(folder: str, package: str) -> list[tuple[str, Path]]:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found.append((".".join([package, *parts]), path))
    return found


TOOLKIT = modules("compilepass", "compilepass")
PASSES = modules("passes", "compilepass.passes")


def each(found: list[tuple[str, Path]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("module", "path"), found, ids=[name for name, _ in found])


def is_package(path: Path) -> bool:
    return path.name == "__init__.py"


@each(TOOLKIT)
def test_toolkit_imports_downwards(module: str, path: Path) -> None:
    assert upward_imports(path.read_text(), module, is_package(path)) == []


@each(PASSES)
def test_passes_use_public_names_only(module: str, path: Path) -> None:
    for found in imports(path.read_text(), module, is_package(path)):
        if found.module.split(".")[0] != "compilepass":
            continue
        if found.module.startswith("compilepass.passes"):
            continue  # relative
        if (found.module, found.names) in ALSO_PUBLIC:
            continue
        assert PUBLIC.fullmatch(found.module), f"line {found.line}: {found.module} is not public"
        private = [name for name in found.names if name.startswith("_")]
        assert not private, f"line {found.line}: {private} are private"


@each(PASSES)
def test_passes_import_one_another_relatively(module: str, path: Path) -> None:
    """mypy checks ``passes`` under that name, so an absolute import would mean another module."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        assert not [n for n in names if n.startswith(("passes", "compilepass.passes"))]


@each(TOOLKIT + PASSES)
def test_private_torch_names_stay_in_their_modules(module: str, path: Path) -> None:
    if module in PRIVATE_TORCH_ALLOWED:
        return
    assert private_torch_names(path.read_text()) == []


def private_torch_names(source: str) -> list[str]:
    """Private packages of torch that code (not text) names: imported, or reached by attributes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        found += [f"line {node.lineno}: {n}" for n in names if PRIVATE_TORCH.match(n)]
    return found


@each(TOOLKIT + PASSES)
def test_only_config_reads_environment_variables(module: str, path: Path) -> None:
    if module == "compilepass.config":
        return
    assert environment_reads(path.read_text()) == []


def environment_reads(source: str) -> list[int]:
    """Lines that name ``os.environ`` or ``os.getenv``, however imported."""
    names = {"environ", "environb", "getenv", "putenv"}
    lines = []
    for node in ast.walk(ast.parse(source)):
        attribute = isinstance(node, ast.Attribute) and node.attr in names
        if attribute and ast.unparse(node.value) == "os":  # type: ignore[attr-defined]
            lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in names]
    return lines


# The checks themselves


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("compilepass.errors", "from .config import get_config"),
        ("compilepass.errors", "import compilepass.config"),
        ("compilepass.errors", "from compilepass import config"),
        ("compilepass.errors", "from compilepass import get_config"),
        ("compilepass.config", "from . import platforms"),
        ("compilepass.rewrite.engine", "from ..passmanager.base import Pass"),
        ("compilepass.rewrite.engine", "def f():\n    from ..compile import plan"),
        ("compilepass.ops.registry", "if TYPE_CHECKING:\n    from ..layers import RMSNorm"),
        ("compilepass.compile", "from .passes import shipped_passes"),
        ("compilepass.cli", "from .passes.fusion import norm_quant"),
        ("compilepass.ops.custom_op", "from ..rewrite import Rule"),
    ],
)
def test_an_upward_import_is_found(module: str, source: str) -> None:
    assert len(upward_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("compilepass.rewrite.engine", "from .term import Term\nfrom . import canonical"),
        ("compilepass.rewrite.engine", "from ..kernels import find"),
        ("compilepass.compile", "from . import inductor"),
        ("compilepass.cli", "import compilepass as cp\nfrom .testing import graph_of"),
        ("compilepass.kernels.registry", "import torch\nfrom torch import Tensor"),
    ],
)
def test_a_downward_import_passes(module: str, source: str) -> None:
    assert upward_imports(source, module) == []


def test_a_module_without_a_place_is_named() -> None:
    with pytest.raises(LookupError, match="compilepass/novel has no place in the layout"):
        upward_imports("from .errors import ConfigError", "compilepass.novel")


def test_private_torch_names_are_found() -> None:
    assert len(private_torch_names("import torch._inductor.config")) == 1
    assert len(private_torch_names("from torch import _dynamo")) == 1
    assert len(private_torch_names("from torch._functorch.aot_autograd import f")) == 1
    assert private_torch_names("torch._dynamo.config.x = 1")
    assert private_torch_names("'''torch._inductor in a text'''\nimport torch._ops") == []


def test_environment_reads_are_found() -> None:
    source = "import os\nfrom os import environ\na = os.environ['A']\nb = os.getenv('B')\n"
    assert environment_reads(source) == [2, 3, 4]
    assert environment_reads("def from_env(environ): return environ['A']") == []
