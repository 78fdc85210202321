"""``PluggableLayer``: whole layers, with parameters and sub-layers, that can be replaced.

No forwards per platform: an out-of-tree class replaces the layer when it is built, so its
constructor must accept the calls that the model's code makes.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from ..errors import OpTypeError
from .registry import MAIN
from .replaceable import Replaceable

__all__ = ["PluggableLayer", "SignatureChecked"]


class SignatureChecked(Replaceable):
    """A replaceable layer whose replacement must accept the same constructor calls."""

    def __init__(self) -> None:  # nn.Module's own accepts anything, as far as its signature says
        super().__init__()

    @classmethod
    def _check_replacement(cls, replacement: type[nn.Module]) -> None:
        super()._check_replacement(replacement)
        problem = _difference(_parameters(cls), _parameters(replacement))
        if problem:
            raise OpTypeError(
                f"{replacement.__module__}.{replacement.__qualname__} cannot replace "
                f"{cls.__module__}.{cls.__qualname__}: {problem}",
                why=f"It is built with the calls that were written for {cls.__qualname__}"
                f"{inspect.signature(cls.__init__)}.",
                hint="Give __init__ the same parameters; further ones need a default.",
            )


def _parameters(cls: type[nn.Module]) -> dict[str, inspect.Parameter]:
    own = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {parameter.name: parameter for parameter in own}


def _difference(
    wanted: dict[str, inspect.Parameter], given: dict[str, inspect.Parameter]
) -> str | None:
    """How ``given`` fails to accept every call that ``wanted`` accepts, or ``None``."""
    kinds = {p.kind for p in given.values()}
    takes_all = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    for name, parameter in wanted.items():
        other = given.get(name)
        if other is None and takes_all:
            continue
        if other is None:
            return f"it has no parameter {name!r}"
        if other.kind is not parameter.kind:
            kinds_differ = f"{other.kind.description}, not {parameter.kind.description}"
            return f"its parameter {name!r} is {kinds_differ}"
        if other.default is other.empty and parameter.default is not parameter.empty:
            return f"its parameter {name!r} has no default"
    for name, other in given.items():
        variadic = other.kind in (other.VAR_POSITIONAL, other.VAR_KEYWORD)
        if name not in wanted and other.default is other.empty and not variadic:
            return f"its parameter {name!r} is required, and {name!r} is never given"
    return _reordered(wanted, given)


def _reordered(
    wanted: dict[str, inspect.Parameter], given: dict[str, inspect.Parameter]
) -> str | None:
    positional = [n for n, p in wanted.items() if p.kind is p.POSITIONAL_OR_KEYWORD and n in given]
    theirs = [n for n, p in given.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for mine, other in zip(positional, theirs, strict=False):
        if mine != other:
            return f"its parameter {other!r} stands where {mine!r} is"
    return None


class PluggableLayer(SignatureChecked):
    """A layer that an out-of-tree class may replace when it is built.

    ``@PluggableLayer.register("mla")`` names a layer, ``@MLA.register_oot`` (or
    ``@PluggableLayer.register_oot(name="MLA")``) its replacement, whose constructor must accept
    the same calls; an ``OpTypeError`` names both classes and the parameter that differs.
    """

    _registry = MAIN

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; every subclass writes it."""
        raise NotImplementedError(f"{type(self).__qualname__} has no forward")
