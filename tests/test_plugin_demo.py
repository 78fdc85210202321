"""A package that is installed beside compilepass changes all five kinds, and nothing unasked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parent / "plugin_demo"
FP32_ATOL = 2e-6

pytestmark = pytest.mark.slow  # it builds and installs a package


def _run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed from a copy, since building writes beside the sources."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    shutil.copytree(DEMO, source, dirs_exist_ok=True)
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    _run("-m", "pip", "install", *options, "--target", str(target), str(source))
    return target


def _python(installed: Path, *command: str, **environment: str) -> str:
    only_this = {"PYTHONPATH": str(installed), "COMPILEPASS_PLUGINS": "compilepass-demo-plugin"}
    return _run(*command, **only_this, **environment).splitlines()[-1]


@pytest.fixture(scope="module")
def observed(installed: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(_python(installed, str(DEMO / "observe.py")))
    return facts


def test_no_part_of_the_plugin_is_broken(observed: dict[str, Any]) -> None:
    assert observed["broken"] == []


def test_the_platform_is_used_where_it_is_chosen_only(observed: dict[str, Any]) -> None:
    assert observed["platforms"]["detected"] != "demo"
    assert observed["platforms"]["chosen"] == ["demo", "forward_native"]


def test_an_available_platform_of_a_plugin_is_detected(installed: Path) -> None:
    script = "from compilepass.platforms import current_platform; print(current_platform().name)"
    assert _python(installed, "-c", script, DEMO_PLATFORM="1") == "demo"


def test_the_op_is_replaced_and_the_policy_still_decides(observed: dict[str, Any]) -> None:
    ops = observed["ops"]
    assert ops["built"] == "DemoRMSNorm"
    assert ops["methods"] == ["forward_oot", "forward_native"]
    assert ops["ran"] == ["compilepass_demo::rms_norm"]
    assert ops["distance"] < FP32_ATOL


def test_the_layer_is_replaced_and_computes_the_same(observed: dict[str, Any]) -> None:
    layers = observed["layers"]
    assert layers["built"] == ["AbsorbedLatentAttention", "MultiHeadLatentAttention"]
    assert layers["distance"] < FP32_ATOL


def test_the_kernel_provider_is_asked_first_and_may_decline(observed: dict[str, Any]) -> None:
    kernels = observed["kernels"]
    assert kernels["best"] == "demo"
    assert kernels["all"] == ["demo", "cpp"]
    assert kernels["even"] == ["aten::rms_norm", "compilepass::rms_norm"]
    assert kernels["odd"] == ["compilepass::rms_norm"]
    assert "aten::rms_norm" not in kernels["trained"]


def test_the_pass_puts_the_kernel_in_the_graph(observed: dict[str, Any]) -> None:
    assert observed["passes"]["matches"] == 1
    assert observed["passes"]["distance"] < FP32_ATOL
