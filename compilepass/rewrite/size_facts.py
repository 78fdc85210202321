"""What the guards of a graph say of its symbolic sizes, so that equal sizes look equal.

The halves of a row of unknown size ``s`` are ``(s + 1) // 2`` and ``s - (s + 1) // 2`` wide. The
graph multiplies them, so it has the guard that they are equal, from which it follows that ``s`` is
even: written as ``2 * (s // 2)``, both halves are ``s // 2``.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

__all__ = ["known", "without_facts"]

_LARGEST = 16  # parts that a size is looked at to be divisible into

_multiples: WeakKeyDictionary[ShapeEnv, tuple[int, dict[Any, Any]]] = WeakKeyDictionary()


_plain: WeakSet[ShapeEnv] = WeakSet()


def without_facts(env: ShapeEnv) -> None:
    """Leave the sizes of ``env`` as they are: those of a pattern are variables to be solved for."""
    _plain.add(env)


def known(size: torch.SymInt) -> Any:
    """The expression of ``size``, with what is known to be a multiple written as one."""
    expr, env = size.node.expr, size.node.shape_env
    if not isinstance(env, ShapeEnv) or expr.is_number:
        return expr
    if env in _plain:
        return expr
    multiples = _multiples.get(env)
    if multiples is None or multiples[0] != len(env.guards):
        multiples = _multiples[env] = len(env.guards), _read([g.expr for g in env.guards])
    return expr.xreplace(multiples[1]) if multiples[1] else expr


def _read(guards: list[Any]) -> dict[Any, Any]:
    """For sizes that a guard makes multiples of a number: what to write in their stead."""
    found: dict[Any, Any] = {}
    for guard in guards:
        if not isinstance(guard, sympy.Eq):
            continue
        difference = guard.lhs - guard.rhs
        for part in difference.atoms(FloorDiv, Mod, PythonMod):
            base, by = part.args
            symbols = base.free_symbols
            if not by.is_Integer or not 1 < by <= _LARGEST or len(symbols) != 1:
                continue
            (size,) = symbols
            if size not in found and _must_divide(int(by), size, difference):
                found[size] = by * FloorDiv(size, by)
    return found


def _must_divide(by: int, size: Any, difference: Any) -> bool:
    """Whether ``difference`` is zero only where ``size`` is a multiple of ``by``."""
    whole = sympy.Dummy(integer=True, nonnegative=True)
    plain = difference.replace(Mod, sympy.Mod).replace(PythonMod, sympy.Mod)  # they know more
    rests = [sympy.expand(plain.xreplace({size: by * whole + r})) for r in range(by)]
    return rests[0] == 0 and all(r.is_number and r != 0 for r in rests[1:])
