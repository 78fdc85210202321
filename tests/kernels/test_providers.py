"""Providers of other packages: which calls they take. What they compute needs a GPU to be seen,
but for Liger's, which are Triton (``interpreted_triton``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compilepass import kernels
from compilepass.kernels.providers import missing

from .cases import EPS


def supports(op: str, provider: str, *args: Any) -> str | None:
    known = kernels.find(f"compilepass::{op}")
    assert known is not None
    (found,) = (p for p in known.providers if p.name == provider)
    assert found.supports is not None
    assert found.priority < 0
    return found.supports(*args)


@pytest.mark.parametrize(
    ("op", "provider", "args", "reason"),
    [
        ("rms_norm", "flashinfer", ("bf16", "weight", EPS, "torch"), None),
        ("rms_norm", "flashinfer", ("bf16", "weight", EPS, "gemma"), None),
        ("rms_norm", "flashinfer", ("bf16", "weight", EPS), "rounds once"),
        ("rms_norm", "flashinfer", ("fp32", "weight32", EPS, "torch"), "float32 is none of"),
        ("silu_and_mul", "flashinfer", ("bf16",), None),
        ("silu_and_mul", "flashinfer", ("odd",), "no multiple of 16"),
        ("rms_norm", "quack", ("fp32", "weight32", EPS), None),
        ("rms_norm", "quack", ("bf16", "weight", EPS), "rounds once"),
        ("rms_norm", "quack", ("bf16", "weight32", EPS, "torch"), "one dtype"),
        ("fused_add_rms_norm", "quack", ("bf16", "bf16", "weight", EPS, "gemma"), None),
        ("rotary_embedding", "quack", ("heads", "heads", "angles", "angles", False), None),
        ("rotary_embedding", "quack", ("heads", "heads", "table", "table", True), "each token"),
        ("rms_norm", "liger", ("bf16", "weight", EPS), None),
        ("gelu_mul", "liger", ("bf16", "bf16", "tanh"), None),
        ("gelu_mul", "liger", ("bf16", "bf16", "none"), "by tanh only"),
        ("silu_mul", "liger", ("wide", "wide"), "wider than 65536"),
    ],
    ids=str,
)
def test_a_package_takes_the_calls_that_its_kernels_can_do(
    op: str, provider: str, args: tuple[Any, ...], reason: str | None
) -> None:
    tensors = {
        "bf16": torch.empty(4, 64, dtype=torch.bfloat16),
        "fp32": torch.empty(4, 64),
        "odd": torch.empty(4, 62, dtype=torch.bfloat16),
        "wide": torch.empty(1, 65537),
        "weight": torch.empty(64, dtype=torch.bfloat16),
        "weight32": torch.empty(64),
        "heads": torch.empty(4, 3, 64, dtype=torch.bfloat16),
        "angles": torch.empty(4, 32, dtype=torch.bfloat16),
        "table": torch.empty(32, dtype=torch.bfloat16),
    }
    given = tuple(tensors.get(a, a) if isinstance(a, str) else a for a in args)
    answer = supports(op, provider, *given)
    assert answer is None if reason is None else reason in (answer or "")


def test_a_release_with_other_functions_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "quack_kernels-0.4.1.dist-info" / "METADATA"
    record.parent.mkdir()
    record.write_text("Metadata-Version: 2.1\nName: quack-kernels\nVersion: 0.4.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing("quack") == "0.4.1 is older than 0.6.5: pip install -U quack-kernels"
