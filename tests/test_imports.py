"""``import compilepass`` stays cheap: what only some commands need is imported by those."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "depyf",
    "jinja2",
    "rich",
    "transformers",
    "triton",
    "typer",
)


def modules_after(code: str) -> tuple[list[str], float]:
    """The heavy modules that ``code`` imports in a process that has torch, and its seconds."""
    script = (
        "import json, sys, time, torch\n"
        "before = set(sys.modules)\n"
        "start = time.perf_counter()\n"
        f"{code}\n"
        "took = time.perf_counter() - start\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules and m not in before]\n"
        "print(json.dumps([heavy, took]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    heavy, took = json.loads(done.stdout.splitlines()[-1])
    return heavy, took


def test_import_leaves_heavy_modules_alone() -> None:
    heavy, took = modules_after("import compilepass\ncompilepass.Rule")
    print(f"import compilepass: {took:.2f} s after torch")
    assert heavy == []


@pytest.mark.parametrize("module", ["", ".pytest_plugin", ".cli"])
def test_torch_waits_for_the_first_name_that_is_used(module: str) -> None:
    code = f"import sys, compilepass{module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("first", ["compilepass.compile", "compilepass.testing"])
def test_compile_is_the_function_whatever_is_imported_first(first: str) -> None:
    code = f"import {first}; assert callable(compilepass.compile)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_config_a_plan_and_an_op_leave_inductor_alone() -> None:
    heavy, _ = modules_after(
        "import compilepass as cp\n"
        "config = cp.CompilationConfig(custom_ops=['none'], passes=['default'])\n"
        "str(cp.plan(config))\n"
        "from compilepass.layers import RMSNorm\n"
        "with cp.use_config(config): RMSNorm(64)(torch.randn(2, 64))\n"
        "import compilepass.passes"
    )
    assert heavy == []
