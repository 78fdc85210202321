"""The identity of code: what a pass does, as a hash of everything that decides it.

Inductor keeps compiled graphs under the uuid of the passes that made them; two plans that act
differently under one uuid would return each other's results. So the hash covers a function's
bytecode (a comment does not count, two lambdas on one line do), its closure and defaults, and every
function, class and constant that it reaches by name within its own package. Constants are names in
capitals, numbers, strings and tuples; other globals may be registries, whose content depends on
what was imported. Code of torch and of Python counts by its name: their versions are in the uuid.

Nothing that differs between processes gets in: no address, no order of a set.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch

__all__ = ["Unidentified", "fingerprint"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_BY_NAME = {"builtins", "sympy", "torch", *sys.stdlib_module_names}
_SCALARS = (str, bytes, int, float, complex, bool, type(None), type(Ellipsis))
_CONSTANTS = (*_SCALARS, tuple, frozenset, Enum, torch.dtype)
_TORCH_NAMES = (
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
    torch.dtype,
    torch.device,
)
_ABSENT = object()


class Unidentified(Exception):
    """Something says of itself that it has no identity: a pass whose ``uuid()`` is ``None``."""


def fingerprint(*things: Any) -> str:
    """A hex digest of functions, classes, passes, rules and plain values.

    An object with a ``uuid()``, as Inductor's passes have, is identified by that. Raises
    :class:`Unidentified` where it is ``None``.
    """
    walk = _Walk()
    digest = hashlib.sha256()
    for thing in things:
        for part in walk.parts(thing):
            digest.update(part.encode())
            digest.update(b"\0")
    return digest.hexdigest()


class _Walk:
    """Turns objects into text. A thing that was met before is its number, so that cycles end."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, Any]] = {}  # the object is kept, so its id stays its own

    def parts(self, thing: Any) -> Iterator[str]:
        if isinstance(thing, Enum):
            yield f"{type(thing).__qualname__}.{thing.name}"
        elif isinstance(thing, _SCALARS):
            yield f"{type(thing).__name__} {thing!r}"
        elif isinstance(thing, tuple):
            yield from self._items("tuple", thing)
        elif isinstance(thing, (set, frozenset)):
            yield from self._items("set", sorted(fingerprint(item) for item in thing))
        elif isinstance(thing, _TORCH_NAMES):
            yield str(thing)
        elif isinstance(thing, types.MethodType):  # made anew at each access
            yield from self.parts((thing.__func__, thing.__self__))
        elif id(thing) in self._met:
            yield f"met {self._met[id(thing)][0]}"
        else:
            self._met[id(thing)] = len(self._met), thing
            yield from self._once(thing)

    def _items(self, label: str, items: Iterable[Any]) -> Iterator[str]:
        items = list(items)
        yield f"{label} {len(items)}"
        for item in items:
            yield from self.parts(item)

    def _once(self, thing: Any) -> Iterator[str]:
        if isinstance(thing, list):
            yield from self._items("list", thing)
        elif isinstance(thing, Mapping):
            keyed = sorted((fingerprint(key), value) for key, value in thing.items())
            yield from self._items("dict", [part for pair in keyed for part in pair])
        elif isinstance(thing, functools.partial):
            yield from self.parts((thing.func, thing.args, thing.keywords))
        elif isinstance(thing, types.FunctionType):
            yield from self._function(thing)
        elif isinstance(thing, type):
            yield from self._class(thing)
        elif isinstance(thing, (staticmethod, classmethod)) or hasattr(thing, "__wrapped__"):
            yield from self.parts((type(thing).__name__, thing.__wrapped__))
        elif isinstance(thing, property):
            yield from self.parts((thing.fget, thing.fset))
        elif isinstance(thing, torch.Tensor):
            yield from self.parts(_tensor(thing))
        elif isinstance(thing, (torch.fx.GraphModule, torch.fx.Graph)):
            yield thing.code if isinstance(thing, torch.fx.GraphModule) else str(thing)
        elif isinstance(thing, types.ModuleType):
            yield f"module {thing.__name__}"
        else:
            yield from self._instance(thing)

    def _function(self, fn: types.FunctionType) -> Iterator[str]:
        yield f"function {fn.__qualname__}"
        if _package(fn) in _BY_NAME:
            return
        yield from self._code(fn.__code__)
        yield from self.parts((fn.__defaults__, fn.__kwdefaults__))
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            yield name
            try:
                yield from self.parts(cell.cell_contents)
            except ValueError:  # a cell that is not filled yet
                yield "empty"
        for name, value in sorted(_globals_of(fn).items()):
            if isinstance(value, (types.FunctionType, type)) or hasattr(value, "__wrapped__"):
                yield name
                same = _package(value) == _package(fn)
                yield from self.parts(value) if same else [_qualified(value)]
            elif _is_constant(name, value):
                yield name
                yield from self.parts(value)

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield code.co_code.hex() + getattr(code, "co_exceptiontable", b"").hex()
        yield from self.parts((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code(constant)
            else:
                yield from self.parts(constant)

    def _class(self, cls: type) -> Iterator[str]:
        yield f"class {cls.__qualname__}"
        if _package(cls) in _BY_NAME:
            return
        if issubclass(cls, Enum):
            yield from self.parts([(member.name, member.value) for member in cls])
            return
        yield from self._items("bases", cls.__bases__)
        for name, member in sorted(vars(cls).items()):
            if isinstance(member, (types.FunctionType, staticmethod, classmethod, property)):
                made = getattr(member, "__code__", None)
                if made is not None and made.co_filename == "<string>":
                    continue  # written by dataclasses
                yield name
                yield from self.parts(member)
            elif not name.startswith("__") and _is_constant(name, member):
                yield name
                yield from self.parts(member)

    def _instance(self, thing: Any) -> Iterator[str]:
        if callable(getattr(thing, "uuid", None)):
            uuid = thing.uuid()
            if uuid is None:
                raise Unidentified(f"{thing!r} has no uuid")
            yield from self.parts(("uuid", uuid))
            return
        state = _state(thing)
        if state is None or _package(type(thing)) == "sympy":
            yield f"{_qualified(type(thing))} {_ADDRESS.sub('', repr(thing))}"
            return
        yield from self.parts((type(thing), state))


def _state(thing: Any) -> dict[str, Any] | None:
    """What an object holds, or ``None`` where that cannot be seen."""
    if dataclasses.is_dataclass(thing):
        return {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
    slots = [s for cls in type(thing).__mro__ for s in vars(cls).get("__slots__", ())]
    held = {s: getattr(thing, s) for s in slots if s != "__weakref__" and hasattr(thing, s)}
    if hasattr(thing, "__dict__"):
        return {**held, **vars(thing)}
    return held or None


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    about = (str(tensor.dtype), tuple(map(str, tensor.shape)), str(tensor.device))
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return about
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return (*about, hashlib.sha256(data.numpy().tobytes()).hexdigest())


def _globals_of(fn: types.FunctionType) -> dict[str, Any]:
    """The globals that a function reads, by dotted name: ``native.rms_norm`` for a module's."""
    found: dict[str, Any] = {}
    for first, *attributes in _names_read(fn.__code__):
        name, value = first, fn.__globals__.get(first, _ABSENT)
        for attribute in attributes:
            if value is _ABSENT:
                break
            found[name] = value
            if not _is_own_module(value, fn):
                value = _ABSENT
                break
            name, value = f"{name}.{attribute}", getattr(value, attribute, _ABSENT)
        if value is not _ABSENT:
            found[name] = value
    return found


@functools.lru_cache(4096)
def _names_read(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """The globals that code reads, each with the attributes that are read of it in turn."""
    chains: list[list[str]] = []
    for part in _codes(code):
        follows = False
        for step in dis.get_instructions(part):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                chains.append([step.argval])
                follows = True
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and follows:
                chains[-1].append(step.argval)
            else:
                follows = False
    return tuple(dict.fromkeys(map(tuple, chains)))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_own_module(value: Any, fn: types.FunctionType) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] == _package(fn)


def _is_constant(name: str, value: Any) -> bool:
    if isinstance(value, _CONSTANTS):
        return True
    frozen = dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen  # type: ignore[union-attr]
    if isinstance(value, (list, set, dict)):
        return name.rpartition(".")[2].isupper()
    return bool(frozen)


def _package(thing: Any) -> str:
    return (getattr(thing, "__module__", None) or "").partition(".")[0]


def _qualified(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"
