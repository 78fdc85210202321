"""The Triton kernels on a machine without a GPU: interpreted, compiled for GPUs, and traced."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compilepass import kernels
from compilepass.kernels.native.fused_quantisation import QUANTISATIONS
from compilepass.kernels.triton import TRITON_OPS

from .cases import CASES
from .gpu_that_is_absent import AMD, NVIDIA, launches, only_compiled, traced

triton = pytest.importorskip("triton", reason="needs Triton: pip install compilepass[triton]")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_kernels_compute_what_native_does_in_the_interpreter() -> None:
    """In a process of its own, since Triton reads the variable when it is imported."""
    options = ("-q", "-n0", "-p", "no:cacheprovider", "--no-header", "-rN")
    tests = Path(__file__).with_name("interpreted_triton.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tests],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 800
    assert "skipped" not in done.stdout


def test_each_shipped_op_has_a_triton_kernel_but_for_matrix_products() -> None:
    shipped = {op.name.removeprefix("compilepass::") for op in kernels.SHIPPED}
    assert set(TRITON_OPS) == {n for n in shipped if "linear" not in n}


def test_each_op_has_a_triton_kernel_that_says_why_it_does_not_run() -> None:
    for short in TRITON_OPS:
        op = kernels.find(f"compilepass::{short}")
        assert op is not None
        assert [p.name for p in op.providers if p.device_type == "cuda" and not p.priority] == [
            "triton"
        ]
        if not torch.cuda.is_available():
            assert "triton: torch finds no CUDA or ROCm device" in op.available("cuda").reason


# Without a GPU, what the compiler makes of a kernel can still be read.


def compiled(kernel: Any, target: tuple[str, Any, int], dtype: str, **constants: Any) -> Any:
    """A kernel compiled for a GPU that need not be there: strides are int64, pointers ``dtype``."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sink = constants.get("SINK", "as it is")
    stored = "*u8" if sink.endswith("fp8") else "*i8" if sink.endswith("int8") else f"*{dtype}"
    special = {"out": stored, "zero_points": "*i32", "zero_point": "*i32"}
    special |= dict.fromkeys(("scales", "scale"), "*fp32")
    special |= dict.fromkeys(("eps", "by", "limit"), "fp32")
    pointers = ("x", "residual", "weight", "bias", "total", "gate", "up", "cos", "sin")
    pointers += ("other_x", "other_weight", "other_out")
    signature = {
        name: "constexpr"
        if name in constants
        else special.get(name, f"*{dtype}" if name in pointers else "i64")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(kernel, signature, places), target=GPUTarget(*target))


ROTATION = {"WIDTH": 80, "TURNED": 64, "PAIRS": 32, "REST": 16, "ROWS": 8}
HALVES = {
    "INTERLEAVED": False,
    "PER_PAIR": False,
    "WIDE": False,
    "VARIANT": "none",
    "PAIRED": False,
}
GATED = ("silu", "gelu_none", "gelu_tanh", "fatrelu", "swigluoai")
UNGATED = ("gelu_tanh", "quick_gelu", "relu2")


@pytest.fixture
def _own_cache(tmp_path: Path) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("width", [1000, 3000], ids=["whole", "walked"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("target", [NVIDIA, AMD], ids=["nvidia", "amd"])
def test_every_kernel_compiles_for_gpus(
    target: tuple[str, Any, int], dtype: str, width: int
) -> None:
    from compilepass.kernels.triton import activations, norms, rotary, sinks

    def compiles(kernel: Any, **constants: Any) -> None:
        binary = compiled(kernel, target, dtype, **constants).asm
        assert binary["cubin" if target is NVIDIA else "hsaco"]

    sizes = {"WIDTH": width, "BLOCK": 1024}
    plain = {"SINK": "as it is", "GROUP": 1}
    for variant in ("llama", "torch", "gemma"):
        compiles(norms._norm_rows, **sizes, VARIANT=variant, ADDS=True, **plain)
        compiles(rotary._rotate_rows, **ROTATION, **{**HALVES, "VARIANT": variant})
    compiles(norms._layer_norm_rows, **sizes, ADDS=True, WEIGHTED=True, BIASED=True, **plain)
    for activation in GATED:
        step = 2 if activation == "swigluoai" else 1
        compiles(activations._blocks, **sizes, ACTIVATION=activation, GATES=True, STEP=step)
    for activation in UNGATED:
        compiles(activations._blocks, **sizes, ACTIVATION=activation, GATES=False, STEP=1)
    for kind in QUANTISATIONS:
        into = {"SINK": kind, "GROUP": 8}
        compiles(sinks._quantise_rows, **sizes, **into, FINDS="static" not in kind)
        if width <= sizes["BLOCK"]:
            compiles(norms._norm_rows, **sizes, VARIANT="llama", ADDS=False, **into)
            compiles(activations._rows, **sizes, ACTIVATION="silu", STEP=1, **into)
    compiles(rotary._rotate_rows, **ROTATION, **{**HALVES, "INTERLEAVED": True, "PAIRED": True})


@pytest.mark.slow
@pytest.mark.usefixtures("_own_cache")
def test_every_launch_compiles_for_the_arguments_it_gets() -> None:
    """Triton takes a size or a stride of 1 as a constant, which is another kernel."""
    from compilepass.kernels.triton import _load

    for name, case in CASES.items():
        short = name.partition("/")[0]
        if short in TRITON_OPS:
            function = _load(TRITON_OPS[short][0], short)
            for shape in ((1, 1), (2, 3, 33)):
                with only_compiled() as launched:
                    function(*case.inputs(shape, torch.bfloat16))
                assert len(launched) == 1, name


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_compiler_fuses_no_product_of_a_rotation_into_its_sum(dtype: str, wide: bool) -> None:
    """A fused one is rounded once, where native rounds twice: the two would differ in a bit."""
    from compilepass.kernels.triton import rotary

    flags = {**HALVES, "WIDE": wide}
    ptx = compiled(rotary._rotate_rows, NVIDIA, dtype, **ROTATION, **flags).asm["ptx"]
    used = Counter(re.findall(r"^\s+(fma|add|sub|mul)[.a-z0-9]*?[.](?:b?f)(?:16|32)", ptx, re.M))
    assert used["add"] == used["sub"] > 0
    assert not re.findall(r"fma\.rn\.b?f16", ptx)
    zero = r"0f00000000|%\w+"
    products = re.findall(rf"fma\.rn\.f32\s+%\w+, %\w+, %\w+, ({zero});", ptx)
    assert len(products) == used["fma"] > 0
    assert set(products) <= {"0f00000000"} | _zeros(ptx)


def _zeros(ptx: str) -> set[str]:
    """Registers that hold a zero."""
    return set(re.findall(r"mov\.[bf]32\s+(%\w+), 0f00000000;", ptx))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("short", TRITON_OPS)
def test_inductor_sees_the_launches_of_the_op_and_what_they_write(
    short: str, dynamic: bool
) -> None:
    importlib.import_module(f"compilepass.kernels.triton.{TRITON_OPS[short][0]}")
    op = getattr(torch.ops.compilepass_triton, short).default
    args = CASES[short].inputs((8, 64), torch.bfloat16)
    found = launches(traced(lambda *a: op(*a), args, dynamic))
    assert len(found) == 1
    written = sum(len(node.kwargs["tensors_to_clone"]) for node in found)
    assert written == len(op._schema.returns)
