"""Times each fused CPU kernel against its native reference, eager and compiled by Inductor.

The three, and a copy of as many bytes, are interleaved and the minimum is kept, so that a noisy
machine disturbs all alike.
Run ``python scripts/bench/kernels.py --json out.json``; ``--quick`` for a first look.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from compilepass import kernels

HIDDEN, INTERMEDIATE, HEAD = 4096, 14336, 128
EPS = 1e-6


@dataclass(frozen=True)
class Measurement:
    """Microseconds a call, the best of all rounds."""

    op: str
    dtype: str
    rows: int
    threads: int
    kernel: float
    compiled: float
    eager: float
    copy: float


def arguments(op: str, rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    x = torch.randn(rows, HIDDEN, dtype=dtype)
    weight = torch.randn(HIDDEN, dtype=dtype)
    gated = torch.randn(rows, 2 * INTERMEDIATE, dtype=dtype)
    q = torch.randn(rows, HIDDEN // HEAD, HEAD, dtype=dtype)
    heads = q.view(1, *q.shape).transpose(1, 2)  # as attention wants them
    tables = torch.rand(2, rows, HEAD, dtype=dtype)
    half = torch.rand(2, rows, HEAD // 2, dtype=dtype)
    wq = torch.randint(-127, 128, (HIDDEN, HIDDEN), dtype=torch.int8)
    return {
        "rms_norm": (x, weight, EPS),
        "fused_add_rms_norm": (x, torch.randn_like(x), weight, EPS),
        "layer_norm": (x, weight, weight, EPS),
        "fused_add_layer_norm": (x, torch.randn_like(x), weight, weight, EPS),
        "silu_and_mul": (gated,),
        "mul_and_silu": (gated,),
        "fatrelu_and_mul": (gated, 0.5),
        "swigluoai_and_mul": (gated, 1.702, 7.0),
        "gelu_new": (gated,),
        "gelu_fast": (gated,),
        "quick_gelu": (gated,),
        "relu2": (gated,),
        "gelu_and_mul": (gated, "tanh"),
        "silu_mul": gated.chunk(2, -1),
        "gelu_mul": (*gated.chunk(2, -1), "tanh"),
        "quant_int8": (x,),
        "int8_linear": (*kernels.native.quant_int8(x), wq, torch.rand(HIDDEN), None, dtype),
        "rotary_embedding": (q, q[:, :8], *half, False),
        "rotate": (heads, *tables),
        "qk_norm_rope": (q, q[:, :8], weight[:HEAD], weight[HEAD : 2 * HEAD], *half, EPS, False),
        "rms_norm_dynamic_int8_quant": (x, weight, EPS),
        "fused_add_rms_norm_dynamic_int8_quant": (x, torch.randn_like(x), weight, EPS),
        "silu_and_mul_dynamic_int8_quant": (gated,),
        "silu_mul_dynamic_int8_quant": gated.chunk(2, -1),
        "gelu_and_mul_dynamic_int8_quant": (gated, "tanh"),
        "gelu_mul_dynamic_int8_quant": (*gated.chunk(2, -1), "tanh"),
    }[op]


def keep_memory() -> None:
    """Let glibc keep what is freed: else results come with page faults, which differ by size."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


def copy_of(args: tuple[Any, ...], result: Any) -> Callable[..., Any]:
    """A copy that moves as many bytes as a kernel must: its tensors once, and its results."""
    outputs = result if isinstance(result, tuple) else (result,)
    tensors = [t for t in (*args, *outputs) if isinstance(t, torch.Tensor)]
    half = sum(t.nbytes for t in tensors) // 2
    source, target = torch.ones(half, dtype=torch.uint8), torch.ones(half, dtype=torch.uint8)
    return lambda *_: target.copy_(source)


def best(functions: list[Callable[..., Any]], args: tuple[Any, ...], seconds: float) -> list[float]:
    minima = [float("inf")] * len(functions)
    for function in functions:
        function(*args)
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function(*args)
            minima[i] = min(minima[i], time.perf_counter() - start)
    return [round(1e6 * m, 2) for m in minima]


def measure(
    rows: list[int], threads: list[int], seconds: float, only: list[str]
) -> list[Measurement]:
    ops = {op.name.partition("::")[2]: op for op in kernels.SHIPPED if op.available("cpu").ok}
    ops = {name: op for name, op in ops.items() if not only or name in only}
    results = []
    for name, op in ops.items():
        compiled = torch.compile(op.native, dynamic=True)
        for dtype in (torch.bfloat16, torch.float32):
            for count in threads:
                torch.set_num_threads(count)
                for n in rows:
                    args = arguments(name, n, dtype)
                    copy = copy_of(args, op.overload(*args))
                    times = best([op.overload, compiled, op.native, copy], args, seconds)
                    short = str(dtype).removeprefix("torch.")
                    results.append(Measurement(name, short, n, count, *times))
    return results


def table(results: list[Measurement]) -> Table:
    shown = Table(title=f"µs a call (H={HIDDEN}, I={INTERMEDIATE}); ratios are over the kernel")
    for heading in (
        "op",
        "dtype",
        "threads",
        "rows",
        "kernel",
        "Inductor",
        "eager",
        "copy",
        "vs Inductor",
        "vs eager",
    ):
        shown.add_column(heading, justify="left" if heading in ("op", "dtype") else "right")
    for m in results:
        ratios = (f"{m.compiled / m.kernel:.2f}", f"{m.eager / m.kernel:.2f}")
        times = (f"{t:.1f}" for t in (m.kernel, m.compiled, m.eager, m.copy))
        shown.add_row(m.op, m.dtype, str(m.threads), str(m.rows), *times, *ratios)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--quick", action="store_true", help="256 rows and 1 thread only")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for one line")
    parser.add_argument("--op", action="append", default=[], help="this op; may be given again")
    options = parser.parse_args()
    keep_memory()
    with torch.inference_mode():
        results = measure(
            [256] if options.quick else [1, 32, 256],
            [1] if options.quick else [1, 2],
            options.seconds,
            options.op,
        )
    Console(width=120).print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(m) for m in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
