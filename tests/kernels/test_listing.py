"""The list of kernels says of each provider whether it runs here, and why not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from compilepass import kernels
from compilepass.kernels.listing import Listed, listed
from compilepass.kernels.providers import PACKAGES

_names = (f"listing_test::op{i}" for i in itertools.count())


@pytest.fixture
def op() -> kernels.KernelOp:
    return kernels.define(f"{next(_names)}(Tensor x) -> Tensor", native=lambda x: x + 1)


def provide(op: kernels.KernelOp, name: str, priority: int = 0, **options: Any) -> None:
    options.setdefault("load", lambda: torch.neg)
    kernels.provider(op.name, name=name, device_type="cpu", priority=priority, **options)


def states(op: kernels.KernelOp) -> list[tuple[str, str, str]]:
    return [(row.provider, row.state, row.reason) for row in listed(op)]


def test_native_is_listed_where_it_runs(op: kernels.KernelOp) -> None:
    assert list(listed(op)) == [
        Listed(op.name, "cpu", "native", None, "runs", "there is no kernel")
    ]


def test_each_state_has_its_reason(op: kernels.KernelOp) -> None:
    def broken() -> Any:
        raise ImportError("no such library")

    provide(op, "elsewhere", 5, available=lambda: "needs a TPU")
    provide(op, "broken", 4, load=broken)
    provide(op, "picky", 3, supports=lambda x: "odd")
    provide(op, "plain", 2)
    provide(op, "spare", 1)
    assert states(op) == [
        ("elsewhere", "absent", "needs a TPU"),
        ("broken", "absent", "ImportError('no such library')"),
        ("picky", "runs", ""),
        ("plain", "next", "for what picky declines"),
        ("spare", "idle", "plain comes first"),
    ]


def test_a_package_that_is_not_installed_is_listed_with_what_installs_it() -> None:
    op = kernels.find("compilepass::rms_norm")
    assert op is not None
    rows = {row.provider: row for row in listed(op) if row.device == "cuda"}
    assert set(PACKAGES) < set(rows)
    for name, package in PACKAGES.items():
        if rows[name].reason.startswith("not installed"):
            assert rows[name].reason == f"not installed: pip install {package}"
        elif not torch.cuda.is_available():
            assert rows[name].reason == "torch finds no CUDA or ROCm device"
