"""Which platforms there are, and which one this process runs on.

An out-of-tree platform that is available wins over a built-in one, so that a vendor's package needs
no configuration. The answer is found once, when it is first needed, and forgotten when a platform
is registered or unregistered. ``use_platform`` overrides it for a scope of one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..errors import PlatformError, did_you_mean
from ..plugins import Plugin, iter_plugins
from .base import Platform, check_platform
from .builtin import BUILTIN_PLATFORMS

__all__ = [
    "current_platform",
    "get_platform",
    "list_platforms",
    "platform_for",
    "register_platform",
    "unregister_platform",
    "use_platform",
]

GROUP = "compilepass.platforms"
_IN_PROCESS = "this process (register_platform)"
_BUILTIN = "compilepass"

_chosen: ContextVar[Platform | None] = ContextVar("compilepass_platform", default=None)
_lock = threading.RLock()
_registered: dict[str, Platform] = {}
_all: tuple[Platform, ...] | None = None
_current: Platform | None = None


def current_platform() -> Platform:
    """The platform that enabled ops run on: ``use_platform``'s, else the first available one."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    global _current
    with _lock:
        if _current is None:
            _current = next(p for p in list_platforms() if p.is_available())
        return _current


def list_platforms() -> tuple[Platform, ...]:
    """All platforms in the order of detection: out-of-tree ones by name, then the built-in ones."""
    global _all
    with _lock:
        if _all is None:
            _all = _find_all()
        return _all


def get_platform(name: str) -> Platform:
    """The platform called ``name``, importing only the plugin of that name where there is one."""
    with _lock:
        known = {p.name: p for p in (*BUILTIN_PLATFORMS, *_registered.values(), *(_all or ()))}
        if name in known:
            return known[name]
        for plugin in iter_plugins(GROUP, error=PlatformError):
            platform = _load(plugin) if plugin.name == name else None
            if platform is not None and platform.name == name:
                return platform
        known = {p.name: p for p in list_platforms()}
    if name not in known:
        raise PlatformError(
            f"there is no platform {name!r}",
            why="It is neither built in, registered, nor shipped by an installed plugin.",
            hint=did_you_mean(name, known),
        )
    return known[name]


def platform_for(device: torch.device | str | torch.Tensor) -> Platform:
    """The platform that handles a device (or a tensor's): the current one where it fits."""
    where = device.device if isinstance(device, torch.Tensor) else torch.device(device)
    current = current_platform()
    if current.device_type == where.type:
        return current
    fitting = [p for p in list_platforms() if p.device_type == where.type]
    if not fitting:
        known = sorted({p.device_type for p in list_platforms()})
        raise PlatformError(
            f"no platform handles the device type {where.type!r}",
            why=f"The platforms here handle {', '.join(known)}.",
            hint="Install the plugin of its vendor, or register_platform() one.",
        )
    return next((p for p in fitting if p.is_available()), fitting[0])


@contextmanager
def use_platform(platform: Platform | str) -> Iterator[Platform]:
    """Make ``platform`` the current one inside the ``with``, available or not, in this thread."""
    chosen = get_platform(platform) if isinstance(platform, str) else check_platform(platform)
    token = _chosen.set(chosen)
    try:
        yield chosen
    finally:
        _chosen.reset(token)


def register_platform(platform: Platform) -> None:
    """Add a platform to this process, as a plugin would; ``unregister_platform`` takes it back."""
    check_platform(platform)
    with _lock:
        sources = {p.name: _BUILTIN for p in BUILTIN_PLATFORMS}
        sources |= {plugin.name: plugin.distribution for plugin in _plugins()}
        sources |= dict.fromkeys(_registered, _IN_PROCESS)
        if platform.name in sources:
            raise _two_of_a_name(platform.name, sources[platform.name], _IN_PROCESS)
        _registered[platform.name] = platform
        _forget()


def unregister_platform(name: str) -> None:
    """Take back a platform that ``register_platform`` added."""
    with _lock:
        if name not in _registered:
            raise PlatformError(
                f"the platform {name!r} was not registered in this process",
                why="Built-in platforms and plugins cannot be unregistered.",
                hint=did_you_mean(name, _registered),
            )
        del _registered[name]
        _forget()


def _forget() -> None:
    global _all, _current
    _all = _current = None


def _plugins() -> list[Plugin]:
    return iter_plugins(GROUP, error=PlatformError)


def _load(plugin: Plugin) -> Platform | None:
    platform: Platform | None = plugin.load(_instance)
    return platform


def _instance(loaded: Any) -> Platform:
    """An entry point names an instance, a subclass or a function without arguments."""
    platform = check_platform(loaded if isinstance(loaded, Platform) else loaded())
    platform.is_available()  # one that cannot even answer this is broken, and is left out here
    return platform


def _find_all() -> tuple[Platform, ...]:
    out_of_tree = dict(_registered)
    sources = {p.name: _BUILTIN for p in BUILTIN_PLATFORMS}
    sources |= dict.fromkeys(_registered, _IN_PROCESS)
    for plugin in _plugins():
        platform = _load(plugin)
        if platform is None:
            continue
        if platform.name in sources:
            raise _two_of_a_name(platform.name, sources[platform.name], plugin.distribution)
        sources[platform.name] = plugin.distribution
        out_of_tree[platform.name] = platform
    return (*(out_of_tree[name] for name in sorted(out_of_tree)), *BUILTIN_PLATFORMS)


def _two_of_a_name(name: str, first: str, second: str) -> PlatformError:
    return PlatformError(
        f"two platforms are called {name!r}",
        why=f"They come from {first!r} and {second!r}.",
        hint="Uninstall one of them, or list the plugins to use in COMPILEPASS_PLUGINS.",
    )
