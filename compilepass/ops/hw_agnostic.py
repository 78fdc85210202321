"""Ops and layers for a path without platform code: registries of their own, two forwards.

A plugin that overrides a class of this path subclasses the class of this path::

    RMSNorm = hw_agnostic.resolve("my_engine.layers", "RMSNorm")

    @RMSNorm.register_oot
    class MyRMSNorm(RMSNorm):
        def forward_oot(self, x): ...
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from ..errors import OpTypeError, RegistrationError, did_you_mean
from ..platforms import Platform
from ..reporting import note
from .custom_op import DispatchedOp
from .pluggable import SignatureChecked
from .registry import HW_AGNOSTIC, MAIN
from .replaceable import Replaceable

__all__ = ["CustomOp", "PluggableLayer", "op_registry", "op_registry_oot", "resolve"]

op_registry = HW_AGNOSTIC.ops
op_registry_oot = HW_AGNOSTIC.oot


class _HardwareAgnostic(Replaceable):
    """What both classes check: a replacement derives from the class of this very path."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        built = super().__new__(cls, *args, **kwargs)
        unused = MAIN.oot.get(cls.__name__)
        if unused is not None and cls.__name__ not in HW_AGNOSTIC.oot:
            note(
                "ops",
                f"{unused.__module__}.{unused.__qualname__} overrides {cls.__name__!r} in the main "
                f"registry only, so the hardware-agnostic {cls.__module__}.{cls.__qualname__} "
                f"never uses it. Subclass hw_agnostic.resolve({cls.__module__!r}, "
                f"{cls.__name__!r}) and register that.",
            )
        return built

    @classmethod
    def _check_replacement(cls, replacement: type[nn.Module]) -> None:
        super()._check_replacement(replacement)
        if not issubclass(replacement, cls):
            raise OpTypeError(
                f"{replacement.__module__}.{replacement.__qualname__} cannot replace the "
                f"hardware-agnostic {cls.__module__}.{cls.__qualname__}",
                why="It does not derive from it.",
                hint=f"Subclass hw_agnostic.resolve({cls.__module__!r}, {cls.__name__!r}).",
            )


class CustomOp(_HardwareAgnostic, DispatchedOp):
    """A custom op with ``forward_native`` and ``forward_oot`` only, whatever the platform.

    An enabled op runs ``forward_oot``, which is ``forward_native`` unless a replacement writes it.
    """

    _registry = HW_AGNOSTIC
    _forwards = ("forward_native", "forward_oot")

    _device_bound = False

    @classmethod
    def _platform_method(cls, platform: Platform) -> str:
        return "forward_oot"

    def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)


class PluggableLayer(_HardwareAgnostic, SignatureChecked):
    """A replaceable layer of the hardware-agnostic path."""

    _registry = HW_AGNOSTIC

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; every subclass writes it."""
        raise NotImplementedError(f"{type(self).__qualname__} has no forward")


def resolve(module: ModuleType | str, name: str) -> type[Any]:
    """The class that this path builds for ``name`` in ``module`` (or its dotted name), to subclass.

    Raises ``RegistrationError`` if there is none, ``OpTypeError`` if it is of another path.
    """
    where = import_module(module) if isinstance(module, str) else module
    found = getattr(where, name, None)
    if found is None:
        classes = [n for n, value in vars(where).items() if isinstance(value, type)]
        raise RegistrationError(
            f"{where.__name__} has no {name!r}",
            why="The hardware-agnostic path builds the classes of that module.",
            hint=did_you_mean(name, classes),
        )
    if not (isinstance(found, type) and issubclass(found, _HardwareAgnostic)):
        raise OpTypeError(
            f"{where.__name__}.{name} is not a hardware-agnostic class",
            why="It derives from neither hw_agnostic.CustomOp nor hw_agnostic.PluggableLayer.",
            hint="Register with @CustomOp.register_oot of the main path instead.",
        )
    return found
