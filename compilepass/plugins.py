"""Plugins of other packages, found through entry points and never allowed to break the host.

Groups: ``compilepass.platforms``, ``.ops``, ``.kernels`` and ``.passes``. A plugin is imported
only by ``Plugin.load``; one that raises is recorded, its traceback logged once, and the caller goes
on without it. ``COMPILEPASS_PLUGINS`` limits who may load, by entry-point or distribution name; the
toolkit's own entry points are not plugins in that sense and always load.

    for plugin in iter_plugins("compilepass.ops"):
        plugin.load()
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .config import plugin_allowlist
from .errors import CompilePassError, RegistrationError

__all__ = ["BrokenPlugin", "Plugin", "broken_plugins", "iter_plugins"]

_OWN = "compilepass"

_log = logging.getLogger("compilepass")
_lock = threading.Lock()
_broken: dict[tuple[str, str, str], BrokenPlugin] = {}


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that raised when it was loaded, with its traceback."""

    group: str
    name: str
    distribution: str
    traceback: str


def _as_it_is(loaded: Any) -> Any:
    return loaded


@dataclass(frozen=True)
class Plugin:
    """One entry point, and the ``distribution`` (package) that ships it."""

    name: str
    distribution: str
    entry_point: EntryPoint

    def load(self, use: Callable[[Any], Any] = _as_it_is) -> Any:
        """Import the plugin and return ``use(imported)``, or ``None`` if either raises."""
        try:
            return use(self.entry_point.load())
        except Exception as error:
            self._record(error)
            return None

    def _record(self, error: Exception) -> None:
        key = self.entry_point.group, self.name, self.distribution
        text = "".join(traceback.format_exception(error))
        with _lock:
            known = key in _broken
            _broken[key] = BrokenPlugin(*key, text)
        if not known:
            _log.warning(
                "plugin %r of %r (entry-point group %r) is broken and is left out; its author or "
                "its installation must be fixed:\n%s",
                self.name,
                self.distribution,
                self.entry_point.group,
                text,
            )


def iter_plugins(group: str, *, error: type[CompilePassError] = RegistrationError) -> list[Plugin]:
    """The allowed plugins of a group, by name, not yet imported.

    Two distributions that ship one name are an ``error`` that names both, since which of them
    would win is an accident of the installation.
    """
    allowed = plugin_allowlist()
    found: dict[str, Plugin] = {}
    for entry_point in entry_points(group=group):
        distribution = entry_point.dist.name if entry_point.dist is not None else "?"
        plugin = Plugin(entry_point.name, distribution, entry_point)
        if distribution != _OWN and allowed is not None and not _allows(allowed, plugin):
            continue
        other = found.setdefault(plugin.name, plugin)
        if other.distribution != distribution:
            raise error(
                f"two plugins are called {plugin.name!r} in the entry-point group {group!r}",
                why=f"They come from {other.distribution!r} and {distribution!r}.",
                hint="Uninstall one of them, or list the one to use in COMPILEPASS_PLUGINS.",
            )
    return [found[name] for name in sorted(found)]


def _allows(allowed: tuple[str, ...], plugin: Plugin) -> bool:
    return plugin.name in allowed or plugin.distribution in allowed


def broken_plugins() -> tuple[BrokenPlugin, ...]:
    """The plugins that were left out because they raised."""
    with _lock:
        return tuple(_broken.values())
