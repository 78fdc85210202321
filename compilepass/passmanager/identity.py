"""What decides how a plan changes a graph, factor by factor.

Two compiles with the same factors give the same graphs, so their hash is what caches go by, and the
factors that differ say why a graph was compiled again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..kernels import find
from ..rewrite import Engine
from .base import Pass
from .fingerprint import Unidentified, fingerprint
from .plan import Plan

__all__ = ["plan_factors"]

_SHOWN = 16  # hex digits of a hash that stands for code


def plan_factors(plan: Plan, engine: Engine, device_type: str) -> dict[str, str] | None:
    """Each factor by name; ``None`` if a pass has no identity, so that nothing may be cached."""
    kernels = sorted({kernel for pass_ in plan.running for kernel in pass_.kernels})
    try:
        return {
            "torch": torch.__version__,
            "platform": device_type,
            "engine": _of_code(type(engine)),
            "order of passes": " ".join(pass_.name for pass_ in plan.running),
            **{key: value for p in plan.running for key, value in _of_pass(p).items()},
            **{f"kernel {kernel}": _of_kernel(kernel, device_type) for kernel in kernels},
        }
    except Unidentified:
        return None


def _of_pass(pass_: Pass) -> dict[str, str]:
    options = pass_.options()
    factors = {f"pass {pass_.name}": _of_code(type(pass_))}
    for name, value in options.items():
        plain = isinstance(value, (bool, int, float, str, type(None)))
        text = repr(value) if plain else fingerprint(value)[:_SHOWN]
        factors[f"pass {pass_.name}, option {name}"] = text
    return factors


def _of_code(cls: type) -> str:
    # a function that a class of ours calls does not change; one of a notebook may
    known = _remembered if cls.__module__.partition(".")[0] == "compilepass" else fingerprint
    return known(cls)[:_SHOWN]


_remembered = functools.lru_cache(256)(fingerprint)


def _of_kernel(kernel: str, device_type: str) -> str:
    """What decides where a kernel may stand: its semantics, and what its providers take."""
    op = find(kernel)
    if op is None:
        return "not registered"
    providers: list[Any] = [(p.name, p.priority, p.supports) for p in op.providers]
    code = fingerprint(op.native, providers)[:_SHOWN]
    return f"version {op.version}, run by {op.available(device_type).provider}, {code}"
