"""Replacing classes for a scope, and finding replacements that never apply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import OpTypeError
from .registry import HW_AGNOSTIC, MAIN, Registry, scoped_overrides
from .replaceable import Replaceable

__all__ = ["override", "unmatched_overrides"]


@contextmanager
def override(
    replaced: type[Replaceable], replacement: type[Replaceable]
) -> Iterator[type[Replaceable]]:
    """Build ``replacement`` wherever ``replaced`` is built, inside the ``with``, in this thread.

    It goes before what is registered with ``register_oot``, and leaves that as it is.
    """
    if not (isinstance(replaced, type) and issubclass(replaced, Replaceable)):
        raise OpTypeError(
            f"{replaced!r} cannot be overridden",
            why="Only subclasses of CustomOp and PluggableLayer are built through a registry.",
            hint="Give the in-tree class first: override(RMSNorm, Mine).",
        )
    replaced._check_replacement(replacement)
    token = scoped_overrides.set({**scoped_overrides.get(), replaced: replacement})
    try:
        yield replacement
    finally:
        scoped_overrides.reset(token)


def unmatched_overrides() -> list[str]:
    """The names given to ``register_oot`` that no class has: those replacements are never built."""
    return sorted(name for r in (MAIN, HW_AGNOSTIC) for name in r.oot.keys() - _in_tree_names(r))


def _in_tree_names(registry: Registry) -> set[str]:
    names, waiting = set(), [Replaceable]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if getattr(cls, "_registry", None) is registry and not registry.is_replacement(cls):
            names.add(cls.__name__)
    return names
