"""Find the passes that could run: those of installed packages, and those registered in code.

Packages offer passes through the entry-point group ``compilepass.passes``; the toolkit's own come
in the same way. An entry point resolves to a pass class, a pass, a list of them, or a function
that returns one of these.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..config import CompilationConfig
from ..errors import PlanError
from ..plugins import iter_plugins
from ..rewrite import Rule
from .base import FusionPass, Pass, PassContext
from .plan import Known

__all__ = ["GROUP", "known_passes"]

GROUP = "compilepass.passes"


def known_passes(config: CompilationConfig, adapt: Callable[[Any], Pass | None]) -> list[Known]:
    """Every pass that the config's policy may name.

    ``adapt`` wraps what is no :class:`Pass` (a callable on a graph, a pass written for Inductor)
    or returns ``None``.
    """
    known = list(_installed())
    for entry in config.extra_passes:
        origin = "config.register_pass"
        for pass_ in _as_passes(entry.pass_, adapt, origin):
            known.append(Known(pass_, origin, entry.before, entry.after, registered=True))
    return known


@functools.cache
def _installed() -> tuple[Known, ...]:
    known = []
    for plugin in iter_plugins(GROUP, error=PlanError):
        origin = f"package {plugin.distribution!r}"
        use = partial(_as_passes, adapt=lambda _: None, origin=origin)
        known += [Known(p, origin) for p in plugin.load(use) or ()]
    return tuple(known)


def _as_passes(item: Any, adapt: Callable[[Any], Pass | None], origin: str) -> list[Pass]:
    return list(_flatten(item, adapt, origin))


def _flatten(item: Any, adapt: Callable[[Any], Pass | None], origin: str) -> Iterator[Pass]:
    if isinstance(item, Pass):
        yield item
    elif isinstance(item, type) and issubclass(item, Pass):
        yield item()
    elif isinstance(item, Rule):
        yield _of_rules((item,))
    elif isinstance(item, (list, tuple)) and item and all(isinstance(i, Rule) for i in item):
        yield _of_rules(tuple(item))
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _flatten(part, adapt, origin)
    elif _takes_nothing(item):
        yield from _flatten(item(), adapt, origin)
    else:
        adapted = adapt(item)
        if adapted is None:
            raise PlanError(
                f"{item!r} from {origin} is not a pass.",
                hint="Give a Pass, a Rule, a callable on a torch.fx.Graph, or an Inductor pass.",
            )
        yield adapted


def _takes_nothing(item: Any) -> bool:
    """Whether ``item`` is a function that makes passes; one that is a pass takes a graph."""
    return inspect.isfunction(item) and not inspect.signature(item).parameters


def _of_rules(given: tuple[Rule, ...]) -> Pass:
    """A pass named after its first rule."""

    class Rules(FusionPass):
        name = given[0].name

        def rules(self, ctx: PassContext) -> tuple[Rule, ...]:
            return given

    return Rules()
