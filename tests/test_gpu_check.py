"""``scripts/gpu_check`` where there is nothing to check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_fails_and_says_so() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "finds no CUDA or ROCm device" in done.stderr
    assert "there is nothing to check" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_not_measured_without_the_gpu_that_was_named() -> None:
    script = ROOT / "scripts" / "bench" / "kernels.py"
    done = subprocess.run(
        [sys.executable, script, "--device", "cuda"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "torch finds no CUDA or ROCm device" in done.stderr
