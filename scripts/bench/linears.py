#!/usr/bin/env python3
"""Time quantised linear layers that a model spells out, in stock ``torch.compile`` and with passes.

    python scripts/bench/linears.py [--size 4096] [--rows 1,32,256] [--only gpt_fast]

Each form is compiled both ways; runs are interleaved and the minimum is kept. ``plain`` is a linear
layer of the dtype of the input, which reads two or four times as many bytes.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernels import best, keep_memory
from rich.console import Console
from rich.table import Table
from torch import Tensor

import compilepass as cp
from compilepass.kernels import native

Form = Callable[[Tensor], Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Measurement:
    """Microseconds a call, the best of all rounds."""

    form: str
    dtype: str
    rows: int
    stock: float
    fused: float
    plain: float


def forms(size: int, dtype: torch.dtype) -> Iterator[tuple[str, str, Form]]:
    """Name, the pass that takes it once, and the layer; weights are ``[size, size]``."""
    wq = torch.randint(-127, 128, (size, size), dtype=torch.int8)
    w8, scales = torch.randn(size, size).to(native.FP8), torch.rand(size) / 100
    bias, half = torch.randn(size).to(dtype), scales.to(dtype)

    def gpt_fast(x: Tensor) -> Tensor:
        return F.linear(x, wq.to(x.dtype)) * half

    def dequantised(x: Tensor) -> Tensor:
        return F.linear(x, (wq.float() * scales[:, None]).to(x.dtype), bias)

    def int8(x: Tensor) -> Tensor:
        q, scale = native.quant_int8(x)
        return ((q.float() @ wq.float().t()) * scale * scales + bias.float()).to(x.dtype)

    def fp8(x: Tensor) -> Tensor:
        q, scale = native.quant_fp8(x)
        return ((q.float() @ w8.float().t()) * scale * scales).to(x.dtype)

    def scaled_mm(x: Tensor) -> Tensor:
        q, scale = native.quant_fp8(x)
        return torch._scaled_mm(q, w8.t(), scale, scales[None], out_dtype=x.dtype)

    yield "gpt_fast", "fuse_weight_only_linear", gpt_fast
    yield "dequantised", "fuse_weight_only_linear", dequantised
    yield "int8", "fuse_int8_linear", int8
    yield "fp8", "fuse_fp8_linear", fp8
    yield "scaled_mm", "fuse_fp8_linear", scaled_mm
    try:
        import torchao.quantization as ao
    except ImportError:
        return
    for name, config, pass_ in (
        ("torchao_weight_only", ao.Int8WeightOnlyConfig, "fuse_weight_only_linear"),
        ("torchao_int8", ao.Int8DynamicActivationInt8WeightConfig, "fuse_int8_linear"),
    ):
        layer = torch.nn.Linear(size, size).to(dtype).requires_grad_(False)
        ao.quantize_(layer, config(set_inductor_config=False))
        yield name, pass_, layer


def measure(size: int, dtype: str, rows: int, only: str, seconds: float) -> Iterator[Measurement]:
    x = torch.randn(rows, size).to(DTYPES[dtype])
    weight = torch.randn(size, size).to(x.dtype)
    for name, pass_, form in forms(size, x.dtype):
        if only and only not in name:
            continue
        torch.compiler.reset()
        stock: Form = torch.compile(form)
        fused: Form = cp.compile(form, cp.CompilationConfig(expect={pass_: 1}))
        times = best([stock, fused, lambda x: F.linear(x, weight)], (x,), seconds, "cpu")
        yield Measurement(name, dtype, rows, *times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--only", default="", help="forms whose name has this")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each form")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    warnings.filterwarnings("ignore")
    found: list[Measurement] = []
    columns = ("form", "dtype", "rows", "stock µs", "fused µs", "stock / fused", "plain µs")
    table = Table(*columns)
    with torch.no_grad():
        for dtype in args.dtypes.split(","):
            for rows in map(int, args.rows.split(",")):
                for m in measure(args.size, dtype, rows, args.only, args.seconds):
                    found.append(m)
                    numbers: list[Any] = [m.stock, m.fused, f"{m.stock / m.fused:.2f}", m.plain]
                    table.add_row(m.form, m.dtype, str(m.rows), *map(str, numbers))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(m) for m in found], indent=1))


if __name__ == "__main__":
    main()
