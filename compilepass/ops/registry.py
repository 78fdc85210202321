"""The registries of ops and layers, and what replaces a class when it is instantiated.

``op_registry`` maps a policy name to its class, ``op_registry_oot`` the name of an in-tree class to
the out-of-tree class that replaces it. ``CustomOp`` and ``PluggableLayer`` share both; the
hardware-agnostic path has a pair of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from ..config import CompilationConfig
from ..errors import ConfigError, did_you_mean
from ..plugins import iter_plugins

__all__ = [
    "HW_AGNOSTIC",
    "MAIN",
    "Registry",
    "check_policy_names",
    "load_op_plugins",
    "op_registry",
    "op_registry_oot",
    "scoped_overrides",
]

OpClass = type[nn.Module]


@dataclass(frozen=True)
class Registry:
    """One family's classes: by policy name, and the replacements by in-tree class name."""

    ops: dict[str, OpClass] = field(default_factory=dict)
    oot: dict[str, OpClass] = field(default_factory=dict)

    def replacement(self, cls: OpClass) -> OpClass | None:
        """The class to build in place of ``cls``: a scoped override first, then a registered."""
        found = scoped_overrides.get().get(cls) or self.oot.get(cls.__name__)
        return None if found is cls else found

    def is_replacement(self, cls: OpClass) -> bool:
        """Whether ``cls`` stands in for another class now."""
        return any(cls is other for other in (*self.oot.values(), *scoped_overrides.get().values()))


op_registry: dict[str, OpClass] = {}
op_registry_oot: dict[str, OpClass] = {}

MAIN = Registry(op_registry, op_registry_oot)
HW_AGNOSTIC = Registry()

#: In-tree class to replacement, in the scope of ``override``.
scoped_overrides: ContextVar[Mapping[OpClass, OpClass]] = ContextVar(
    "compilepass_overrides", default=MappingProxyType({})
)


class _Plugins:
    """Whether the op plugins were loaded; a plugin may build an op while it is being loaded."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.loading = self.loaded = False


_plugins = _Plugins()


def load_op_plugins() -> None:
    """Import the plugins of the group ``compilepass.ops``, once.

    Importing is enough for a plugin that registers with decorators; a function is called.
    """
    if _plugins.loaded:
        return
    with _plugins.lock:
        if _plugins.loaded or _plugins.loading:
            return
        _plugins.loading = True
        try:
            for plugin in iter_plugins("compilepass.ops"):
                plugin.load(_run)
            _plugins.loaded = True
        finally:
            _plugins.loading = False


def _run(loaded: Any) -> None:
    if callable(loaded) and not isinstance(loaded, type):
        loaded()


def check_policy_names(config: CompilationConfig) -> None:
    """Raise a ``ConfigError`` for names in ``custom_ops`` that no op has, with the nearest ones.

    Called when an op takes its decision and when a graph is compiled: before, a plugin may still
    register the name.
    """
    load_op_plugins()
    if _plugins.loading:
        return  # a plugin builds an op while it is loaded; those after it may have the name
    known = MAIN.ops.keys() | HW_AGNOSTIC.ops.keys()
    for name in sorted(config.op_policy().names - known):
        raise ConfigError(
            f"custom_ops names {name!r}, and no op has that name",
            why="No imported module and no installed plugin registered it.",
            hint=did_you_mean(name, known),
        )
