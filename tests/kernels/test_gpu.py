"""What only a GPU can show: the kernels verified there, and in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compilepass import kernels
from compilepass.kernels.triton import TRITON_OPS
from compilepass.kernels.verify import verifiable, verify_all

from .cases import CASES, EPS, mapped, op_of, outputs
from .test_numerics import assert_like_native

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA or ROCm device"),
]


def on_gpu(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return mapped(args, lambda t: t.cuda())


@pytest.mark.parametrize("short", TRITON_OPS)
def test_every_kernel_is_sound(short: str) -> None:
    op = kernels.find(f"compilepass::{short}")
    assert op is not None
    providers = [p for p in verifiable(op) if p.device_type == "cuda"]
    assert "triton" in [p.name for p in providers]
    records = list(verify_all(providers))
    assert [r.to_dict() for r in records if not r.ok] == []


@pytest.mark.parametrize("short", TRITON_OPS)
def test_triton_runs_what_no_package_is_before(short: str) -> None:
    op = kernels.find(f"compilepass::{short}")
    assert op is not None
    assert op.available("cuda").provider == "triton"


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("rota")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rotation_equals_native_exactly(name: str, dtype: torch.dtype) -> None:
    args = on_gpu(CASES[name].inputs((5, 7, 64), dtype))
    op = kernels.find(op_of(name))
    assert op is not None
    for mine, theirs in zip(
        outputs(op_of(name)(*args)), outputs(op.run_native(*args)), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("namespace", ["compilepass", "compilepass_triton"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_by_inductor_it_computes_what_eager_does(namespace: str, dynamic: bool) -> None:
    kernels.ensure_loaded("cuda")  # which defines the ops of Triton
    op = getattr(torch.ops, namespace).fused_add_rms_norm

    def function(x: Tensor, weight: Tensor) -> Tensor:
        normed, total = op(x.relu(), x, weight, EPS)
        return normed.sigmoid() + total

    args = on_gpu((torch.randn(5, 256), torch.randn(256)))
    with torch.no_grad():
        compiled = torch.compile(function, dynamic=dynamic)
        assert_like_native((compiled(*args),), (function(*args),), atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_a_kernel_runs_on_the_device_of_its_arguments() -> None:
    x, weight = torch.randn(4, 64, device="cuda:1"), torch.randn(64, device="cuda:1")
    out = torch.ops.compilepass.rms_norm(x, weight, EPS)
    torch.testing.assert_close(out, kernels.native.rms_norm(x, weight, EPS))
