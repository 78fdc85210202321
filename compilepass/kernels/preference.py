"""Which provider of an op is preferred while something runs, whatever the priorities.

A configuration names providers (``kernel_providers``); what is built or compiled under it asks for
them with each call, and two configurations in one process stay apart.

    with kernels.prefer({"rms_norm": "native"}):
        torch.ops.compilepass.rms_norm(x, weight, 1e-6)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["NATIVE", "preferred", "preferring", "while_preferring"]

NATIVE = "native"

_preferred: ContextVar[Mapping[str, str]] = ContextVar(
    "compilepass_preferred_providers", default=MappingProxyType({})
)


def preferred(op: str) -> str | None:
    """The provider that is preferred now for the op of that qualified name."""
    return _preferred.get().get(op)


@contextmanager
def while_preferring(providers: Mapping[str, str]) -> Iterator[None]:
    """Prefer these providers, by qualified name of their ops, in this scope of one thread."""
    token = _preferred.set(providers)
    try:
        yield
    finally:
        _preferred.reset(token)


def preferring(function: Callable[..., Any], providers: Mapping[str, str]) -> Callable[..., Any]:
    """``function``, for the time of whose calls ``providers`` are preferred."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what is compiled has the preferences of its own config
            return function(*args, **kwargs)
        token = _preferred.set(providers)
        try:
            return function(*args, **kwargs)
        finally:
            _preferred.reset(token)

    return run
