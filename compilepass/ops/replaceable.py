"""Classes that register under a name and can be replaced from outside the tree.

What ``CustomOp`` and ``PluggableLayer`` share: ``register``, ``register_oot``, and the replacement
at instantiation. The root of a family is the class that sets ``_registry``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from torch import nn

from ..errors import OpTypeError, RegistrationError
from ..policy import CUSTOM_OPS
from .registry import Registry, load_op_plugins

__all__ = ["Replaceable"]

C = TypeVar("C", bound=type[nn.Module])

_NAME = re.compile(r"[A-Za-z_][\w.]*")


class Replaceable(nn.Module):
    """A module class with a policy name, which another class may replace when it is built."""

    #: The name under which the class is registered; a subclass inherits it.
    name: ClassVar[str | None] = None
    _registry: ClassVar[Registry]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        load_op_plugins()
        replacement: Any = cls._registry.replacement(cls)
        if replacement is None:
            return super().__new__(cls)
        cls._check_replacement(replacement)
        if issubclass(replacement, cls):
            return super().__new__(replacement)
        if replacement.name is None:
            replacement.name = cls.name  # so that the policy's word for the op holds for it
        # Not an instance of cls, so Python does not run __init__ for us.
        return replacement(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy has the class of its original, whatever replaces that class now.
        return object.__new__, (type(self),), self.__getstate__()

    @classmethod
    def _root(cls) -> type[Replaceable]:
        """The base class of the family: ``CustomOp`` or ``PluggableLayer``."""
        return next(base for base in cls.__mro__ if "_registry" in base.__dict__)

    @classmethod
    def register(cls, name: str) -> Callable[[C], C]:
        """Class decorator that gives a class its name in the policy.

        A second class under the name is a ``RegistrationError``; the same class defined anew (a
        module reloaded, a notebook cell run again) takes the place of the old one.
        """
        if not isinstance(name, str):
            raise OpTypeError(
                f"register() got {name!r}, which is not a name",
                why="A class is registered under its policy name.",
                hint=f'Write @{cls.__name__}.register("my_op").',
            )
        if not _NAME.fullmatch(name) or name in CUSTOM_OPS.bases:
            raise RegistrationError(
                f"{name!r} cannot be the name of an op",
                why="It must read as '+name' in custom_ops, and 'all' and 'none' are bases.",
                hint="Use letters, digits, '_' and '.', as in 'rms_norm'.",
            )

        def decorate(op_class: C) -> C:
            cls._require_family(op_class)
            _add(cls._registry.ops, name, op_class, "registered as")
            op_class.name = name  # type: ignore[attr-defined]
            return op_class

        return decorate

    @classmethod
    def register_oot(cls, op_class: C | None = None, *, name: str | None = None) -> Any:
        """Class decorator for an out-of-tree class that replaces an in-tree one when it is built.

        ``@RMSNorm.register_oot``, ``@RMSNorm.register_oot()`` and
        ``@CustomOp.register_oot(name="RMSNorm")`` are the same: ``name`` is the in-tree class's.
        """
        if name is not None and not isinstance(name, str):
            raise OpTypeError(
                f"register_oot() got name={name!r}",
                why="It is the name of the in-tree class.",
                hint='Write name="RMSNorm".',
            )
        if name is None and cls is cls._root():
            raise RegistrationError(
                f"{cls.__name__}.register_oot does not say which class is replaced",
                why=f"{cls.__name__} itself is never built.",
                hint='Write @RMSNorm.register_oot, or name="RMSNorm".',
            )
        replaced = cls.__name__ if name is None else name

        def decorate(op_class: C) -> C:
            cls._require_family(op_class)
            if cls is not cls._root():
                cls._check_replacement(op_class)
            _add(cls._registry.oot, replaced, op_class, "the replacement of")
            return op_class

        return decorate if op_class is None else decorate(op_class)

    @classmethod
    def _require_family(cls, op_class: object) -> None:
        root = cls._root()
        if isinstance(op_class, type) and issubclass(op_class, root):
            return
        raise OpTypeError(
            f"{op_class!r} is not a subclass of {root.__module__}.{root.__name__}",
            why="Only classes of this family can be registered here or replace one another.",
            hint=f"Decorate a class that derives from {root.__name__}.",
        )

    @classmethod
    def _check_replacement(cls, replacement: type[nn.Module]) -> None:
        """Raise an ``OpTypeError`` if ``replacement`` cannot stand in for this class."""
        cls._require_family(replacement)


def _add(
    table: dict[str, type[nn.Module]], name: str, op_class: type[nn.Module], relation: str
) -> None:
    old = table.get(name)
    if old is not None and _full_name(old) != _full_name(op_class):
        raise RegistrationError(
            f"{_full_name(op_class)} cannot be {relation} {name!r}",
            why=f"{_full_name(old)} is already.",
            hint="Choose another name, or import only one of the two.",
        )
    table[name] = op_class


def _full_name(op_class: type[nn.Module]) -> str:
    return f"{op_class.__module__}.{op_class.__qualname__}"
