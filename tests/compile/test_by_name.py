"""``torch.compile(model, backend="compilepass")``, found by PyTorch through the entry point."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import compilepass as cp

from .models import AddNorm, built, fx_config, inputs

SCRIPT = """
import json, sys, torch

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32))
    def forward(self, x, residual):
        total = x + residual
        return torch.nn.functional.rms_norm(total, (32,), self.weight, 1e-6), total

assert "compilepass" not in sys.modules
model, args = Norm().eval().requires_grad_(False), (torch.randn(4, 32), torch.randn(4, 32))
fast = torch.compile(model, backend="compilepass", options={"backend": "fx"})
distance = max((a - b).abs().max().item() for a, b in zip(fast(*args), model(*args)))
import compilepass
print(json.dumps([distance, compilepass.report().matches]))
"""


@pytest.fixture(autouse=True)
def _forget_earlier_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["compilepass.compile"], "_by_name", [])


@pytest.mark.slow
def test_a_process_that_never_imported_the_package_finds_the_backend() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    distance, matches = json.loads(done.stdout.splitlines()[-1])
    assert distance < 1e-5
    assert matches["fuse_add_rms_norm"] == 1


def run(**options: Any) -> None:
    model, args = built(AddNorm), inputs()
    fast = torch.compile(model, backend="compilepass", **options)
    torch.testing.assert_close(fast(*args), model(*args))


def test_options_are_fields_of_the_config_and_the_report_needs_no_argument() -> None:
    run(options={"backend": "fx"})
    assert cp.report().matches["fuse_add_rms_norm"] == 1
    run(options={"backend": "fx", "passes": "none"})
    assert cp.report().matches["fuse_add_rms_norm"] == 1
    assert len(cp.report().graphs) == 2


def test_the_active_config_applies() -> None:
    config = fx_config(passes=["none", "+fuse_add_rms_norm"])
    with cp.use_config(config):
        run()
    assert cp.report().matches["fuse_add_rms_norm"] == 1
    assert "fuse_norm_quant" not in cp.report().matches


def test_configs_that_differ_in_a_registered_pass_are_two() -> None:
    ran = []
    for number in (1, 2):
        config = fx_config()
        config.register_pass(lambda graph, number=number: ran.append(number))
        torch._dynamo.reset()
        with cp.use_config(config):
            run()
    assert ran == [1, 2]


def test_options_of_inductor_and_modes_are_taken() -> None:
    run(options={"backend": "fx", "epilogue_fusion": False})
    assert "epilogue_fusion" in cp.report().config
    with cp.use_config(fx_config()):
        run(mode="reduce-overhead")
    assert "cudagraphs" in cp.report().config


def test_an_unknown_option_brings_the_nearest() -> None:
    with pytest.raises(Exception, match=r"'epilog_fusion'.*\n.*Did you mean.*'epilogue_fusion'"):
        run(options={"backend": "fx", "epilog_fusion": False})


def test_nothing_compiled_by_name_is_an_empty_report() -> None:
    assert cp.report().graphs == ()
