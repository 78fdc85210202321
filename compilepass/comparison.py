"""One model three ways, each against float64: eager, compiled without passes, compiled with them.

Compiled code rounds elsewhere than eager code does, so "equal to eager" is no sound check: what can
be asked is that the passes do not make the error larger. So the fused error may be ``factor`` times
the larger of the other two, plus a floor for outputs that those compute exactly.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_map

from .compile import Backend, compile, compile_with
from .config import CompilationConfig, CompilationMode, get_config
from .errors import CompilePassError, ConfigError
from .oracle import run_in_float64
from .passmanager import Instrument
from .reporting import Report
from .reporting.text import plain

__all__ = ["TOLERANCES", "Comparison", "Inputs", "OutputError", "Variant", "compare"]

#: Positional tensors, or keywords.
Inputs = Sequence[Any] | Mapping[str, Any]

#: The floor by dtype: a relative error that is allowed even where the unfused code makes none. Half
#: a unit in the last place for the 16-bit types; for the others some units, as sums are reordered.
TOLERANCES: Mapping[str, float] = MappingProxyType(
    {"float64": 1e-14, "float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}
)


@dataclass(frozen=True)
class OutputError:
    """How far one output is from float64.

    ``absolute`` is the largest error of an element, ``relative`` that over the largest element.
    For integers ``mismatches`` counts the elements that differ by more than 1 (booleans: at all).
    """

    output: str
    dtype: str
    absolute: float = 0.0
    relative: float = 0.0
    mismatches: int = 0


@dataclass(frozen=True)
class Variant:
    """One way to run the model: its errors, and ``run()`` to call it again on the same inputs."""

    name: str
    errors: tuple[OutputError, ...]
    run: Callable[[], Any]

    @property
    def worst(self) -> OutputError:
        """The largest of each number over all outputs."""
        outputs = [e.output for e in sorted(self.errors, key=lambda e: -e.relative)]
        return OutputError(
            output=outputs[0],
            dtype=", ".join(dict.fromkeys(e.dtype for e in self.errors)),
            absolute=max(e.absolute for e in self.errors),
            relative=max(e.relative for e in self.errors),
            mismatches=sum(e.mismatches for e in self.errors),
        )


@dataclass(frozen=True)
class Comparison:
    """The errors of ``eager``, ``unfused`` and ``fused`` code, and the report on the fused."""

    eager: Variant
    unfused: Variant
    fused: Variant
    report: Report

    @property
    def variants(self) -> tuple[Variant, Variant, Variant]:
        return self.eager, self.unfused, self.fused

    def ok(self, factor: float = 2.0) -> bool:
        """Whether no error of the fused code is out of bound; see the module for the bound."""
        return not self.failures(factor)

    def failures(self, factor: float = 2.0) -> tuple[str, ...]:
        """A sentence for each output of the fused code that is out of bound."""
        found = []
        errors = (v.errors for v in self.variants)
        for eager, unfused, fused in zip(*errors, strict=True):
            if not fused.dtype == unfused.dtype == eager.dtype:
                found.append(
                    f"{fused.output} is {fused.dtype}; eager {eager.dtype}, "
                    f"{self.unfused.name} {unfused.dtype}"
                )
                continue
            floor = _floor(fused.dtype)
            bound = factor * max(eager.relative, unfused.relative) + floor
            if not fused.relative <= bound:
                found.append(
                    f"{fused.output} ({fused.dtype}): relative error {fused.relative:.3g}, allowed "
                    f"{bound:.3g} = {factor:g} x {max(eager.relative, unfused.relative):.3g} + "
                    f"{floor:.3g}"
                )
            allowed = factor * max(eager.mismatches, unfused.mismatches)
            if fused.mismatches > allowed:
                found.append(
                    f"{fused.output} ({fused.dtype}): {fused.mismatches} elements off by more than "
                    f"1, allowed {allowed:g}"
                )
        return tuple(found)

    def table(self) -> RenderableType:
        """The errors as a rich table."""
        integers = any(v.worst.mismatches for v in self.variants)
        table = Table(title="Errors against float64", title_justify="left", box=None)
        table.add_column("")
        for column in ("max abs", "relative", *(["off by > 1"] if integers else [])):
            table.add_column(column, justify="right")
        table.add_column("largest in")
        for variant in self.variants:
            worst = variant.worst
            off = [str(worst.mismatches)] if integers else []
            numbers = [f"{worst.absolute:.3g}", f"{worst.relative:.3g}", *off]
            table.add_row(variant.name, *numbers, escape(f"{worst.output} ({worst.dtype})"))
        return table

    def explain(self, factor: float = 2.0) -> str:
        """The table as text, and what is out of bound."""
        found = self.failures(factor)
        verdict = "\n".join(f"out of bound: {f}" for f in found) or "within bounds"
        return f"{plain(self.table())}\n{verdict}"

    def __str__(self) -> str:
        return self.explain()


def compare(
    model: Callable[..., Any],
    inputs: Inputs,
    config: CompilationConfig | None = None,
    *,
    emulate_precision_casts: bool = False,
    instruments: Sequence[Instrument] = (),
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Comparison:
    """Run ``model`` in float64, eager, compiled without passes, and with the passes of ``config``.

    ``inputs`` are positional (a tuple) or keywords (a dict); every run gets copies, under
    ``torch.no_grad()``. Without passes means stock Inductor, or for the backend ``"fx"`` the same
    pipeline without passes. ``emulate_precision_casts`` has Inductor round where eager does, in
    both compiled forms. ``instruments`` watch the passes; ``on_stage`` is told what runs next.

    Raises :class:`CompilePassError` for a model that has no stable outputs or no float64 form, and
    :class:`ExpectationError` where the config's ``expect`` is not met.
    """
    config = _checked(config or get_config(), emulate_precision_casts)
    model = getattr(model, "_orig_mod", model)  # a compiled model stands for what it was made of
    args, kwargs = _arguments(inputs)

    def outputs_of(fn: Callable[..., Any]) -> list[tuple[str, Tensor]]:
        copied_args, copied_kwargs = tree_map(_copied, (args, kwargs))
        return list(_tensors(fn(*copied_args, **copied_kwargs), ""))

    with torch.no_grad():
        on_stage("running in float64")
        wanted = list(_tensors(run_in_float64(model, *tree_map(_copied, (args, kwargs))), ""))
        on_stage("running eager")
        eager = outputs_of(model)
        _check_outputs(eager, wanted, outputs_of(model))

        def variant(
            name: str, fn: Callable[..., Any], outputs: list[tuple[str, Tensor]]
        ) -> Variant:
            errors = tuple(_errors(name, outputs, wanted))
            return Variant(name, errors, lambda: fn(*args, **kwargs))

        unfused = compile(model, _without_passes(config))
        name = "torch.compile" if config.compiles_with_inductor else "fx without passes"
        on_stage(f"compiling: {name}")
        unfused_variant = variant(name, unfused, outputs_of(unfused))
        backend = Backend(config, model, instruments)
        fused = compile_with(model, backend)
        on_stage("compiling: compilepass")
        fused_variant = variant("compilepass", fused, outputs_of(fused))
    report = backend.report()
    if not report.graphs:
        raise CompilePassError(
            "Dynamo compiled no graph of this model",
            why="It holds no tensor operation that can be traced, or compiling is switched off.",
            hint="torch.compile(model, fullgraph=True) says what cannot be traced.",
        )
    return Comparison(variant("eager", model, eager), unfused_variant, fused_variant, report)


def _checked(config: CompilationConfig, emulate_precision_casts: bool) -> CompilationConfig:
    if config.mode is not CompilationMode.COMPILE_WITH_PASSES:
        raise ConfigError(
            f"there are no passes to compare with under mode={config.mode.name}",
            hint="Use mode=COMPILE_WITH_PASSES.",
        )
    if not emulate_precision_casts:
        return config
    options = {**config.inductor_options, "emulate_precision_casts": True}
    return config.model_copy(update={"inductor_options": options})


def _without_passes(config: CompilationConfig) -> CompilationConfig:
    stock = CompilationMode.STOCK_TORCH_COMPILE
    other = {"mode": stock} if config.compiles_with_inductor else {"passes": ["none"]}
    off: dict[str, Any] = {
        "level": None,
        "expect": {},
        "strict": False,
        "debug_dump_path": None,
    }
    return config.model_copy(update={**off, **other})


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise CompilePassError(
        f"inputs is of type {type(inputs).__name__}",
        why="A model is called with a tuple of arguments or a dict of keywords.",
        hint="Write (x,) for a single tensor.",
    )


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a model's output, named by where they are: ``"logits"``, ``"1.latent"``."""
    if isinstance(value, Tensor):
        yield path or "output", torch.view_as_real(value) if value.is_complex() else value
        return
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        parts = value
    elif isinstance(value, (tuple, list)):
        parts = dict(enumerate(value))
    elif dataclasses.is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    for name, part in parts.items():
        yield from _tensors(part, f"{path}.{name}" if path else str(name))


def _check_outputs(
    eager: list[tuple[str, Tensor]],
    wanted: list[tuple[str, Tensor]],
    again: list[tuple[str, Tensor]],
) -> None:
    if not eager:
        raise CompilePassError(
            "The model returns no tensors",
            why="There is nothing to compare.",
            hint="Return tensors, in tuples, dicts or dataclasses.",
        )
    reference = [(name, out.double() if out.is_floating_point() else out) for name, out in eager]
    for error in _errors("a second call", again, reference):
        if error.relative > _floor(error.dtype) or error.mismatches:
            raise CompilePassError(
                f"{error.output} differs by {error.relative:.3g} when the model is called again",
                why="It draws random numbers (dropout), or a call changes its state.",
                hint="Call model.eval(), and compare a model that keeps no state.",
            )
    _errors("float64", wanted, reference)


def _errors(
    name: str, outputs: list[tuple[str, Tensor]], wanted: list[tuple[str, Tensor]]
) -> list[OutputError]:
    shapes = [[(where, tuple(out.shape)) for where, out in each] for each in (outputs, wanted)]
    if shapes[0] != shapes[1]:
        raise CompilePassError(
            f"{name} returns other tensors than the model does",
            why=f"{shapes[0]} against {shapes[1]}",
            hint="The number and the shapes of the outputs must not depend on how it is run.",
        )
    return [
        _error(where, out, want) for (where, out), (_, want) in zip(outputs, wanted, strict=True)
    ]


def _error(where: str, out: Tensor, want: Tensor) -> OutputError:
    dtype = str(out.dtype).removeprefix("torch.")
    if not out.numel():
        return OutputError(where, dtype)
    if not out.is_floating_point():
        near = 0 if out.dtype is torch.bool else 1
        off = (out.long() - want.long()).abs() > near
        return OutputError(where, dtype, mismatches=int(off.sum()))
    out, want = out.double(), want.double()
    same = (out == want) | (out.isnan() & want.isnan())
    distance = (out - want).abs().masked_fill(same, 0).nan_to_num(nan=math.inf)
    absolute = float(distance.max())
    size = float(want.abs().masked_fill(~want.isfinite(), 0).max())
    return OutputError(where, dtype, absolute, absolute / size if size else absolute)


def _floor(dtype: str) -> float:
    if dtype in TOLERANCES:
        return TOLERANCES[dtype]
    found: torch.dtype = getattr(torch, dtype)
    return torch.finfo(found).eps if found.is_floating_point else 0.0
