"""Op plugins load at the first op, in a process of their own since that happens once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from compilepass.config import CompilationConfig, use_config
from compilepass.ops import CustomOp
from compilepass.plugins import broken_plugins

@CustomOp.register("in_tree")
class InTree(CustomOp):
    def forward_native(self, x): return "native"

assert not {"vendor", "torch._dynamo", "torch._inductor"} & sys.modules.keys()
with use_config(CompilationConfig(custom_ops="none,+vendor_op,+called_op")):
    print(type(InTree()).__name__, *sorted(b.name for b in broken_plugins()))
"""
VENDOR = """
from compilepass.ops import CustomOp

@CustomOp.register("vendor_op")
class VendorOp(CustomOp): pass

@CustomOp.register_oot(name="InTree")
class Replacement(VendorOp): pass

VendorOp()  # a plugin may build an op while it is being loaded

def register():
    class CalledOp(CustomOp): pass
    CustomOp.register("called_op")(CalledOp)

def broken(): raise RuntimeError
"""
ENTRY_POINTS = """[compilepass.ops]
by_import = vendor
by_call = vendor:register
broken = vendor:broken
"""


@pytest.mark.parametrize(("allowed", "printed"), [(None, "Replacement broken"), ("", None)])
def test_plugins_register_before_names_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str | None, printed: str | None
) -> None:
    (tmp_path / "vendor.py").write_text(VENDOR)
    info = tmp_path / "vendor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("COMPILEPASS_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("COMPILEPASS_PLUGINS", allowed)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    if printed is None:
        assert "names 'called_op', and no op has that name" in done.stderr
    else:
        assert done.stdout.strip() == printed, done.stderr
