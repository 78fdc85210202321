"""Times each fused kernel against its native reference, eager and compiled by Inductor.

These, the kernel as a compiled graph calls it, and a copy of as many bytes, are interleaved, and
the minimum is kept, so that a noisy machine disturbs all alike.
Run ``python scripts/bench/kernels.py --json out.json``; ``--quick`` for a first look; on a GPU with
``--device cuda``. Where the whole takes too long at once, give a few ``--op`` at a time, and then
``--sum out/*.json`` for what they come to.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from compilepass import kernels
from compilepass.kernels.native.fused_quantisation import QUANTISATIONS, SOURCES

HIDDEN, INTERMEDIATE, HEAD = 4096, 14336, 128
EPS = 1e-6
CALLS = 20  # of which the time on a GPU is taken


@dataclass(frozen=True)
class Measurement:
    """Microseconds a call, the best of all rounds."""

    op: str
    provider: str
    dtype: str
    rows: int
    threads: int
    megabytes: float
    kernel: float
    graph: float
    compiled: float
    eager: float
    copy: float

    @property
    def speedup(self) -> float:
        """Over Inductor; one row as a compiled graph calls it, since Inductor's is such a graph."""
        return self.compiled / (self.graph if self.rows == 1 else self.kernel)

    @property
    def bandwidth(self) -> float:
        """GB/s of the kernel."""
        return self.megabytes / self.kernel * 1e3


def arguments(op: str, rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """On the default device."""
    x = torch.randn(rows, HIDDEN, dtype=dtype)
    weight = torch.randn(HIDDEN, dtype=dtype)
    gated = torch.randn(rows, 2 * INTERMEDIATE, dtype=dtype)
    q = torch.randn(rows, HIDDEN // HEAD, HEAD, dtype=dtype)
    heads = q.view(1, *q.shape).transpose(1, 2)  # as attention wants them
    tables = torch.rand(2, rows, HEAD, dtype=dtype)
    half = torch.rand(2, rows, HEAD // 2, dtype=dtype)
    wq = torch.randint(-127, 128, (HIDDEN, HIDDEN), dtype=torch.int8)
    scale, per_channel = torch.full((1,), 0.03), torch.rand(HIDDEN)
    native = kernels.native
    known = {
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
        "asymmetric_quant_int8": (x,),
        "static_quant_int8": (x, scale),
        "quant_fp8": (x,),
        "group_quant_fp8": (x, HEAD),
        "static_quant_fp8": (x, scale),
        "linear": (x, torch.randn(HIDDEN, HIDDEN, dtype=dtype)),
        "int8_linear": (*native.quant_int8(x), wq, per_channel, None, dtype),
        "int8_dynamic_linear": (x, wq, per_channel, None, torch.randn_like(x)),
        "weight_only_int8_linear": (x, wq, per_channel, None),
        "fp8_linear": (*native.quant_fp8(x), wq.to(native.FP8), per_channel, None, dtype),
        "rotary_embedding": (q, q[:, :8], *half, False),
        "rotate": (heads, *tables),
        "rotate_qk": (heads, heads[:, :8], *tables),
        "qk_norm_rope": (q, q[:, :8], weight[:HEAD], weight[HEAD : 2 * HEAD], *half, EPS, False),
        "rms_norm_rotate_qk": (heads, heads[:, :8], *weight[: 2 * HEAD].view(2, -1), *tables, EPS),
        "rms_norm_rotate": (heads, weight[:HEAD], *tables, EPS),
    }
    told = {
        "Tensor scale": scale,
        "Tensor zero_point": torch.full((1,), 17, dtype=torch.int32),
        "int group": HEAD,
    }
    for source, made in SOURCES.items():
        for name, quantisation in QUANTISATIONS.items():
            args, count = known[source], len(made.tensors)
            settings = tuple(told[setting] for setting in quantisation.settings)
            known[f"{source}_{name}_quant"] = (*args[:count], *settings, *args[count:])
    return known[op]


def calling(overload: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own for each op, that Dynamo can trace."""

    def call(*args: Any) -> Any:
        return overload(*args)

    return call


def keep_memory() -> None:
    """Let glibc keep what is freed: else results come with page faults, which differ by size."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)


def bytes_of(args: tuple[Any, ...], result: Any) -> int:
    """What a kernel must move: its tensors once, and its results."""
    outputs = result if isinstance(result, tuple) else (result,)
    return sum(t.nbytes for t in (*args, *outputs) if isinstance(t, torch.Tensor))


def copy_of(size: int) -> Callable[..., Any]:
    """A copy that moves as many bytes."""
    source, target = (torch.ones(size // 2, dtype=torch.uint8) for _ in range(2))
    return lambda *_: target.copy_(source)


def best(
    functions: list[Callable[..., Any]], args: tuple[Any, ...], seconds: float, device: str
) -> list[float]:
    minima = [float("inf")] * len(functions)
    time_of = on_gpu if device == "cuda" else on_cpu
    for function in functions:
        function(*args)
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for i, function in enumerate(functions):
            minima[i] = min(minima[i], time_of(function, args))
    return [round(1e6 * m, 2) for m in minima]


def on_cpu(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def on_gpu(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Of several calls, as they follow one another in a model."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(CALLS):
        function(*args)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / CALLS


def measure(
    device: str, rows: list[int], threads: list[int], seconds: float, only: list[str]
) -> list[Measurement]:
    results = []
    for op in kernels.SHIPPED:
        name, provider = op.name.partition("::")[2], op.available(device).provider
        if provider is None or (only and name not in only):
            continue
        torch._dynamo.reset()  # or the calls of all ops would be variants of one function
        compiled = torch.compile(op.native, dynamic=True)
        graph = torch.compile(calling(op.overload), dynamic=True)
        for dtype in (torch.bfloat16, torch.float32):
            for count in threads:
                torch.set_num_threads(count)
                for n in rows:
                    args = arguments(name, n, dtype)
                    size = bytes_of(args, op.overload(*args))
                    functions = [op.overload, graph, compiled, op.native, copy_of(size)]
                    times = best(functions, args, seconds, device)
                    short = str(dtype).removeprefix("torch.")
                    found = (name, provider, short, n, count, size / 1e6)
                    results.append(Measurement(*found, *times))
    return results


def table(results: list[Measurement]) -> Table:
    shown = Table(title=f"µs a call (H={HIDDEN}, I={INTERMEDIATE}); ratios are over the kernel")
    headings = ("op", "dtype", "threads", "rows", "kernel", "in graph", "Inductor", "eager", "copy")
    for heading in (*headings, "vs Inductor", "vs eager", "GB/s", "of copy"):
        shown.add_column(heading, justify="left" if heading in ("op", "dtype") else "right")
    for m in results:
        times = (f"{t:.1f}" for t in (m.kernel, m.graph, m.compiled, m.eager, m.copy))
        ratios = (f"{m.speedup:.2f}", f"{m.eager / m.kernel:.2f}")
        what = (m.op, m.dtype, str(m.threads), str(m.rows))
        shown.add_row(*what, *times, *ratios, f"{m.bandwidth:.1f}", f"{m.copy / m.kernel:.0%}")
    return shown


def summary(results: list[Measurement]) -> str:
    """What all of it comes to, and what is slower than Inductor's own."""
    lines = [f"geometric mean over Inductor: {geometric_mean([m.speedup for m in results]):.2f}"]
    lines += [
        f"slower than Inductor: {m.op}, {m.dtype}, {m.rows} rows, {m.threads} threads: "
        f"{m.speedup:.2f}"
        for m in results
        if m.speedup < 1
    ]
    return "\n".join(lines)


def show(results: list[Measurement]) -> None:
    console = Console(width=150)
    console.print(table(results))
    console.print(summary(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--quick", action="store_true", help="256 rows and 1 thread only")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for one line")
    parser.add_argument("--op", action="append", default=[], help="this op; may be given again")
    parser.add_argument("--sum", type=Path, nargs="+", help="only read what --json has written")
    options = parser.parse_args()
    if options.sum:
        read = [m for path in options.sum for m in json.loads(path.read_text())]
        show([Measurement(**m) for m in read])
        return
    gpu = options.device == "cuda"
    if gpu and not torch.cuda.is_available():
        parser.error("torch finds no CUDA or ROCm device")
    torch.set_default_device(options.device)
    keep_memory()
    rows = [1, 32, 256, 4096 if gpu else 2048]
    with torch.inference_mode():
        results = measure(
            options.device,
            [256] if options.quick else rows,
            [1] if options.quick or gpu else [1, 2],
            options.seconds,
            options.op,
        )
    show(results)
    if options.json:
        options.json.write_text(json.dumps([asdict(m) for m in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
