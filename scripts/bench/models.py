#!/usr/bin/env python3
"""Time whole models of transformers: eager, under stock ``torch.compile``, and with the passes.

    python scripts/bench/models.py --family llama --scheme int8 --json out.json

A model is built from its config with random weights, at one size for every family. The forms of a
case are called in turn, so that a noisy machine disturbs all alike. A case runs in a process of its
own: what is compiled first pays for what a process loads only once, such as the passes' patterns.

``prefill`` is a whole input, of which the last token's logits are wanted; ``decode`` is one token
behind it, with a cache that is as full at every call. ``before`` is what the user of a quantised
model had: the same model in floating point under stock ``torch.compile``.

Ratios are those of processor time, which other processes disturb less than the time that passes;
what a compile costs includes the C++ compiler, one file after the other.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # so that what it starts can be accounted for

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import compilepass as cp
from compilepass.coverage import FAMILIES, PHASES
from compilepass.models import DTYPES, Target, build, next_token

#: calls in the body of ``call`` that run something
_KERNEL = re.compile(r"(cpp_fused\w*|triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(")


@dataclass(frozen=True)
class Case:
    """One model to measure; ``scheme`` is one of ``quantize_``'s, or empty."""

    family: str
    phase: str
    dtype: str
    scheme: str
    hidden: int
    layers: int
    tokens: int
    seconds: float
    compiles: int
    threads: int


@dataclass(frozen=True)
class Form:
    """One way to run a model: milliseconds of a call, and of them those of the processor.

    ``compile_s`` and ``passes_s`` are processor seconds of each compile.
    """

    name: str
    median: float
    minimum: float
    cpu: float
    peak_mib: float
    kernels: int = 0
    compile_s: tuple[float, ...] = ()
    passes_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measurement:
    case: Case
    forms: tuple[Form, ...] = ()
    matches: Mapping[str, int] = field(default_factory=dict)
    error: str = ""

    def form(self, name: str) -> Form | None:
        return next((f for f in self.forms if f.name == name), None)


def settings(case: Case) -> dict[str, Any]:
    """What makes a model of the size asked for, in the words that its config knows."""
    import transformers

    usual = transformers.AutoConfig.for_model(case.family)
    heads = max(case.hidden // 64, 1)
    wanted = {
        "hidden_size": case.hidden,
        "intermediate_size": case.hidden * 11 // 4 // 64 * 64,
        "num_hidden_layers": case.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 4, 1),
        "vocab_size": 32000,
        # experts and latent attention, as wide as the rest
        "moe_intermediate_size": case.hidden,
        "num_local_experts": 4,
        "n_routed_experts": 8,
        "q_lora_rank": case.hidden // 2,
        "kv_lora_rank": case.hidden // 4,
    }
    known = {*usual.to_dict(), *usual.attribute_map}
    return {name: value for name, value in wanted.items() if name in known}


def prepared(case: Case, scheme: str) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """The model, and what makes the inputs of one call."""
    target = Target(
        f"hf:{case.family}", settings(case), dtype=DTYPES[case.dtype], tokens=case.tokens
    )
    model, made = build(target)
    assert isinstance(model, torch.nn.Module)
    inputs: dict[str, Any] = dict(made)
    if scheme:
        cp.quantize_(model, scheme)
    inputs["logits_to_keep"] = 1
    if case.phase == "prefill":
        return model, lambda: inputs
    following = next_token(model, inputs)
    return model, lambda: {**following, "past_key_values": as_full(following["past_key_values"])}


def as_full(cache: Any) -> Any:
    """A cache that holds the same: a call puts new tensors into it and leaves the old ones."""
    again = copy.copy(cache)
    again.layers = [copy.copy(layer) for layer in cache.layers]
    return again


class Timed:
    """A form under measurement: how it is called, and what its compiles cost."""

    def __init__(self, name: str, call: Callable[..., Any], inputs: Callable[[], Any]) -> None:
        self.name, self.call, self.inputs = name, call, inputs
        self.times: list[float] = []
        self.cpu: list[float] = []
        self.compile_s: list[float] = []
        self.passes_s: list[float] = []
        self.kernels = 0

    def run(self) -> None:
        inputs = self.inputs()
        start, cpu = time.perf_counter(), time.process_time()
        self.call(**inputs)
        self.cpu.append(time.process_time() - cpu)
        self.times.append(time.perf_counter() - start)

    def finished(self) -> Form:
        return Form(
            self.name,
            round(1e3 * statistics.median(self.times), 3),
            round(1e3 * min(self.times), 3),
            round(1e3 * statistics.median(self.cpu), 3),
            round(peak_mib(self), 1),
            self.kernels,
            tuple(round(s, 3) for s in self.compile_s),
            tuple(round(s, 4) for s in self.passes_s),
        )


def compile_all(forms: list[Timed], backends: dict[str, Any], compiles: int) -> None:
    """Compile each form some times, with nothing in the caches, in turn."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    for _ in range(compiles):
        for form in forms:
            with fresh_cache():
                inputs = form.inputs()
                torch.compiler.reset()
                start = processor_seconds()
                _, codes = run_and_get_code(form.call, **inputs)
                form.compile_s.append(processor_seconds() - start)
            form.kernels = sum(map(launches, codes))
            if form.name in backends:
                report = backends[form.name].report()
                form.passes_s.append(sum(g.cpu_ms for g in report.graphs) / 1e3)


def processor_seconds() -> float:
    """Of this process and of those that it has started and waited for."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def launches(code: str) -> int:
    """How many kernels a module that Inductor wrote calls."""
    _, _, body = code.partition("def call(")
    lines = body.partition("def benchmark_compiled_module")[0].splitlines()
    return sum(bool(_KERNEL.search(line)) for line in lines)


def peak_mib(form: Timed) -> float:
    """The most that one call holds at a time, beside the model and its inputs."""
    from torch.profiler import ProfilerActivity, profile

    inputs = form.inputs()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = form.call(**inputs)
    del out
    held = peak = 0
    events = profiled.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    for _, change in sorted(changes, key=lambda c: c[0]):
        held += change
        peak = max(peak, held)
    return peak / 2**20


def measure(case: Case) -> Measurement:
    torch.set_num_threads(case.threads)
    try:
        with torch.no_grad():
            return _measure(case)
    except Exception as error:
        return Measurement(case, error=f"{type(error).__name__}: {error}".splitlines()[0])


def _measure(case: Case) -> Measurement:
    torch.compile(lambda x: x.exp() + 1)(torch.ones(8))  # what Inductor itself loads only once
    model, inputs = prepared(case, case.scheme)
    backend = cp.Backend(cp.CompilationConfig())
    fast = torch.compile(model, backend=backend)
    compiled = [
        Timed("stock", torch.compile(model), inputs),
        Timed("passes", fast, inputs),
    ]
    if case.scheme:
        unquantised, its_inputs = prepared(case, "")
        compiled.append(Timed("before", torch.compile(unquantised), its_inputs))
    compile_all(compiled, {"passes": backend}, case.compiles)
    forms = [Timed("eager", model, inputs), *compiled]
    for form in [*forms, *forms]:  # until what is done once is done
        form.call(**form.inputs())
    deadline = time.perf_counter() + case.seconds
    while time.perf_counter() < deadline or len(forms[0].times) < 3:
        for form in forms:
            form.run()
    matches = {name: n for name, n in backend.report().matches.items() if n}
    return Measurement(case, tuple(f.finished() for f in forms), matches)


def table(found: list[Measurement]) -> Table:
    shown = Table(title=f"ms a call, median; torch {torch.__version__}")
    headings = ("model", "phase", "eager", "stock", "passes", "stock/passes", "before/passes")
    more = ("MiB, stock", "MiB, passes", "kernels", "compile s", "in passes")
    for heading in (*headings, *more):
        shown.add_column(heading, justify="left" if heading in headings[:2] else "right")
    for m in found:
        name = " ".join(filter(None, (m.case.family, m.case.dtype, m.case.scheme)))
        if m.error:
            shown.add_row(name, m.case.phase, m.error)
            continue
        eager, stock, passes = (m.form(n) for n in ("eager", "stock", "passes"))
        before = m.form("before")
        assert eager and stock and passes
        times = [f"{f.median:.2f}" for f in (eager, stock, passes)]
        ratios = [f"{stock.cpu / passes.cpu:.2f}"]
        ratios.append(f"{before.cpu / passes.cpu:.2f}" if before else "")
        memory = [f"{f.peak_mib:.1f}" for f in (stock, passes)]
        kernels = f"{stock.kernels} → {passes.kernels}"
        compiling = f"{min(stock.compile_s):.1f} → {min(passes.compile_s):.1f}"
        shares = [100 * p / c for p, c in zip(passes.passes_s, passes.compile_s, strict=True)]
        share = ", ".join(f"{s:.1f} %" for s in dict.fromkeys((shares[0], shares[-1])))
        shown.add_row(name, m.case.phase, *times, *ratios, *memory, kernels, compiling, share)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", action="append", help="several times for several; default: all")
    parser.add_argument("--phase", action="append", choices=PHASES)
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--scheme", default="", help="quantise with quantize_: int8, …")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15, help="of calls, for one line")
    parser.add_argument("--compiles", type=int, default=1, help="of each form, with empty caches")
    parser.add_argument("--json", type=Path, help="write the measurements here")
    given = parser.parse_args()
    sizes = {n: getattr(given, n) for n in ("hidden", "layers", "tokens", "seconds", "compiles")}
    cases = [
        Case(family, phase, dtype, given.scheme, threads=given.threads, **sizes)
        for family in given.family or FAMILIES
        for dtype in given.dtype or ("fp32",)
        for phase in given.phase or PHASES
    ]
    found = run(cases)
    Console(width=160).print(table(found))
    if given.json:
        given.json.write_text(json.dumps([asdict(m) for m in found], indent=1) + "\n")


def run(cases: list[Case]) -> list[Measurement]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    found = []
    context = multiprocessing.get_context("spawn")
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=f"{case.family} {case.phase}")
            with ProcessPoolExecutor(1, context) as process:
                found.append(process.submit(measure, case).result())
            progress.advance(task)
    return found


if __name__ == "__main__":
    main()
