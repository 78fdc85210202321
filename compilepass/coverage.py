"""How many of a model's sites the passes reach, counted without the passes.

    for found in cover("qwen3", dtype=torch.bfloat16).values(): ...

A model of transformers is built from its config, small and with random weights, and compiled up to
code generation. :mod:`.sites` counts in the graph that Dynamo captured; a pass says with ``covers``
of which kinds each of its matches takes a site.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from .comparison import compare
from .compile import Backend, plan
from .config import CompilationConfig, use_config
from .errors import CompilePassError
from .models import Target, build, next_token
from .reporting import NearMiss
from .sites import KINDS, count_sites

__all__ = ["FAMILIES", "PHASES", "Coverage", "Sites", "cover"]

#: decoders whose norms, gates and rotary embeddings are looked for by default
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2"),
    *("olmo", "glm", "glm4", "granite", "cohere", "starcoder2", "stablelm", "gpt_neox", "phi"),
    *("smollm3", "helium", "nemotron", "exaone4", "mixtral", "qwen3_moe", "deepseek_v3"),
)

Model = Callable[..., Any]

#: ``prefill`` of a whole input, or ``decode`` of one token after it, with a cache
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Sites:
    """How many sites of a kind there are, and how many a pass took."""

    candidates: int
    matched: int

    @property
    def is_whole(self) -> bool:
        return self.matched >= self.candidates

    def __str__(self) -> str:
        return f"{self.matched}/{self.candidates}" if self.candidates or self.matched else "-"


@dataclass(frozen=True)
class Coverage:
    """What the passes reach in one model; ``error`` says why it could not be compiled.

    ``wrong`` has a sentence for each output that is out of bound, if outputs were checked.
    """

    family: str
    dtype: str
    dynamic: bool
    phase: str
    sites: Mapping[str, Sites] = field(default_factory=dict)
    near_misses: tuple[NearMiss, ...] = ()
    seconds: float = 0.0
    error: str = ""
    wrong: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        return not self.error and not self.wrong and all(s.is_whole for s in self.sites.values())

    def to_dict(self) -> dict[str, Any]:
        sites = {
            k: {"candidates": s.candidates, "matched": s.matched} for k, s in self.sites.items()
        }
        return {
            "family": self.family,
            "dtype": self.dtype,
            "dynamic": self.dynamic,
            "phase": self.phase,
            "sites": sites,
            "near_misses": [str(n) for n in self.near_misses],
            "seconds": round(self.seconds, 2),
            "error": self.error,
            "wrong": list(self.wrong),
        }


def cover(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    dynamic: bool = False,
    phase: str = "prefill",
    config: CompilationConfig | None = None,
    check: bool = False,
) -> Coverage:
    """Compile ``hf:family`` with the passes of ``config`` and count what they reached.

    With ``check`` the outputs are compared as :func:`compilepass.testing.assert_compiled_close`
    does: eager, compiled without passes and with them, each against float64.

    Nothing is raised for a model that cannot be built or compiled: the answer says why.
    """
    start = time.perf_counter()
    what = (family, str(dtype).removeprefix("torch."), dynamic, phase)
    config = (config or CompilationConfig()).model_copy(
        update={"backend": "fx", "dynamic": dynamic or None, "expect": {}, "strict": False}
    )
    try:
        candidates, backend = _compile(family, dtype, phase, config)
        wrong = _failures(family, dtype, phase, config) if check else ()
    except Exception as error:  # the model's code, or Dynamo's answer to it
        text = error.what if isinstance(error, CompilePassError) else str(error)
        reason = f"{type(error).__name__}: {text.strip().splitlines()[0] if text.strip() else ''}"
        return Coverage(*what, seconds=time.perf_counter() - start, error=reason)
    kinds = {e.name: e.pass_.covers for e in plan(config).entries}
    report = backend.report()
    matched = Counter[str]()
    for name, count in report.matches.items():
        matched.update(dict.fromkeys(kinds.get(name, ()), count))
    sites = {kind: Sites(candidates[kind], matched[kind]) for kind in KINDS}
    missed = {kind for kind, s in sites.items() if not s.is_whole}
    near = tuple(n for n in report.near_misses if missed.intersection(kinds.get(n.pass_name, ())))
    return Coverage(*what, sites, near, time.perf_counter() - start, wrong=wrong)


def _failures(
    family: str, dtype: torch.dtype, phase: str, config: CompilationConfig
) -> tuple[str, ...]:
    torch.compiler.reset()
    with use_config(config), torch.no_grad():
        model, inputs = _built(family, dtype, phase)
        return compare(model, inputs, config).failures()


def _compile(
    family: str, dtype: torch.dtype, phase: str, config: CompilationConfig
) -> tuple[Counter[str], Backend]:
    torch.compiler.reset()  # a limit on the compiled forms of one code object counts all models
    found: Counter[str] = Counter()
    backend = Backend(config)

    def counting(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        sites = count_sites(module)  # the backend changes the graph
        compiled = backend(module, inputs)  # or has Dynamo begin again
        found.update(sites)
        return compiled

    with use_config(config), torch.no_grad():
        model, inputs = _built(family, dtype, phase)
        torch.compile(model, backend=counting, dynamic=config.dynamic)(**inputs)
    return found, backend


def _built(family: str, dtype: torch.dtype, phase: str) -> tuple[Model, Mapping[str, Any]]:
    model, inputs = build(Target(f"hf:{family}", dtype=dtype))
    assert isinstance(inputs, Mapping)
    return model, next_token(model, inputs) if phase == "decode" else inputs
