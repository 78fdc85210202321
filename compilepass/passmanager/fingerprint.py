"""The identity of code: what a pass does, as a hash of everything that decides it.

Inductor keeps compiled graphs under the uuid of the passes that made them; two plans that act
differently under one uuid would return each other's results. So the hash covers a function's
source, its closure and defaults, and every function and class that it reaches by name, as far as
the package that the pass comes from goes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..rewrite import Rule

__all__ = ["engine_fingerprint", "fingerprint"]


def fingerprint(*things: Any) -> str:
    """A hex digest of functions, classes, passes, rules and plain values."""
    digest = hashlib.sha256()
    seen: set[int] = set()
    for thing in things:
        for part in _parts(thing, seen):
            digest.update(part.encode())
            digest.update(b"\0")
    return digest.hexdigest()


@functools.cache
def engine_fingerprint() -> str:
    """A digest of the code that applies passes, which also decides what they do."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("rewrite", "passmanager"):
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _parts(thing: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(thing, (str, bytes, int, float, bool, type(None))):
        yield repr(thing)
        return
    if isinstance(thing, (list, tuple, set, frozenset)):
        items = sorted(thing, key=repr) if isinstance(thing, (set, frozenset)) else thing
        yield type(thing).__name__
        for item in items:
            yield from _parts(item, seen)
        return
    if isinstance(thing, dict):
        for key in sorted(thing, key=repr):
            yield repr(key)
            yield from _parts(thing[key], seen)
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, functools.partial):
        yield from _parts((thing.func, thing.args, thing.keywords), seen)
    elif isinstance(thing, types.FunctionType):
        yield from _function(thing, seen)
    elif isinstance(thing, types.MethodType):
        yield from _parts((thing.__func__, thing.__self__), seen)
    elif isinstance(thing, type):
        yield from _class(thing, seen)
    elif isinstance(thing, Rule) or dataclasses.is_dataclass(thing):
        yield from _parts(type(thing), seen)
        for f in dataclasses.fields(thing):
            yield f.name
            yield from _parts(getattr(thing, f.name), seen)
    else:
        yield _opaque(thing)


def _function(fn: types.FunctionType, seen: set[int]) -> Iterator[str]:
    yield fn.__qualname__
    yield _source(fn)
    yield from _parts(fn.__defaults__, seen)
    yield from _parts(fn.__kwdefaults__, seen)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        yield name
        try:
            yield from _parts(cell.cell_contents, seen)
        except ValueError:  # a cell that is not filled yet
            yield "empty"
    package = fn.__module__.partition(".")[0]
    names = sorted(_names(fn.__code__))
    for name in names:
        value = fn.__globals__.get(name)
        if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] == package:
            reached = {n: getattr(value, n, None) for n in names}
        else:
            reached = {name: value}
        for label, item in reached.items():
            if _belongs(item, package) or isinstance(item, (int, float, str, bool, tuple)):
                yield label
                yield from _parts(item, seen)


def _class(cls: type, seen: set[int]) -> Iterator[str]:
    yield cls.__qualname__
    yield _source(cls)
    package = cls.__module__.partition(".")[0]
    for base in cls.__mro__[1:]:
        if _belongs(base, package):
            yield from _parts(base, seen)
    for name, member in sorted(vars(cls).items()):
        if isinstance(member, types.FunctionType):
            yield name
            yield from _function(member, seen)


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _belongs(value: Any, package: str) -> bool:
    return (
        isinstance(value, (types.FunctionType, type))
        and (value.__module__ or "").partition(".")[0] == package
    )


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
        return _bytecode(code) if code is not None else repr(thing)


def _bytecode(code: types.CodeType) -> str:
    constants = [c if not isinstance(c, types.CodeType) else _bytecode(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {constants!r} {code.co_names!r}"


def _opaque(thing: Any) -> str:
    """Modules, dtypes, operators and the like, by name rather than by address."""
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    return f"{type(thing).__qualname__} {name or thing}"
