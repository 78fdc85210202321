"""Run a replacement and what it replaces on the same inputs, and compare both with float64.

The inputs have the shapes, strides and dtypes of the graph's values, with seeded random elements.
A replacement may round in another way than the original; it is wrong where its error is more than
``FACTOR`` times the original's, plus a few units in the last place (one step for integers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils._pytree import tree_map

from ..kernels.float64 import InFloat64, widen
from ..reporting import note
from .reject import Reject
from .rule import Rule

__all__ = ["FACTOR", "find_difference"]

FACTOR = 4.0
SEED = 20240607

_ULPS = 4
_MEAN_STEP = 0.02  # integers: share of elements that may round to the neighbour


def find_difference(
    rule: Rule, old: Sequence[Node | None], new: Sequence[Node], inputs: Sequence[Node]
) -> Reject | None:
    """Why the values ``new``, computed from ``inputs``, are not those of ``old``; or ``None``.

    What cannot be run is noted and passes: the graph's own operations on random elements, say.
    """
    pairs = [(o, n) for o, n in zip(old, new, strict=True) if o is not None]
    with torch.no_grad(), unset_fake_temporarily():
        try:
            given = _Values({n: _sample(n.meta["val"], SEED + i) for i, n in enumerate(inputs)})
            was = [given.of(o) for o, _ in pairs]
            exact_values = _Values(widen(given.known))
            with InFloat64():
                exact = [exact_values.of(o) for o, _ in pairs]
        except Exception as error:
            note("rewrite", f"a site of {rule} is not verified: {type(error).__name__}: {error}")
            return None
        try:
            replacement = _Values({n: given.known[n] for n in inputs})
            now = [replacement.of(n) for _, n in pairs]
        except Exception as error:
            return _reject(rule, f"raises {type(error).__name__}: {error}", "a result", "none")
        for i, (a, b, reference) in enumerate(zip(was, now, exact, strict=True)):
            before, after = _Error.of(a, reference), _Error.of(b, reference)
            allowed = before.allowed(a, reference)
            if not after <= allowed:
                return _reject(
                    rule,
                    f"computes another output {i} (seed {SEED})",
                    f"{allowed}, {FACTOR:g} times that of the original",
                    str(after),
                )
    return None


def _reject(rule: Rule, what: str, expected: str, found: str) -> Reject:
    return Reject(
        "numerics",
        f"the replacement of {rule} {what}.",
        expected=expected,
        found=found,
        hint="Compare it with the pattern on its own; the site is left as it was.",
    )


@dataclass(frozen=True)
class _Error:
    """Distance from the float64 result: of the worst element, and on average."""

    worst: float
    mean: float

    def __str__(self) -> str:
        return f"an error of at most {self.worst:.3g}, {self.mean:.3g} on average"

    def __le__(self, other: _Error) -> bool:
        return self.worst <= other.worst and self.mean <= other.mean

    @classmethod
    def of(cls, value: Tensor, exact: Tensor) -> _Error:
        if not value.numel():
            return cls(0.0, 0.0)
        wide, exact = value.double(), exact.double()
        same = (wide == exact) | (wide.isnan() & exact.isnan())
        error = torch.where(same, 0.0, (wide - exact).abs()).nan_to_num(nan=torch.inf)
        return cls(float(error.max()), float(error.mean()))

    def allowed(self, value: Tensor, exact: Tensor) -> _Error:
        """The error that a replacement may have where this is the original's."""
        if not value.dtype.is_floating_point:
            return _Error(FACTOR * self.worst + 1, FACTOR * self.mean + _MEAN_STEP)
        size = exact.double().abs().nan_to_num(posinf=0.0)
        slack = _ULPS * torch.finfo(value.dtype).eps * float(size.max() if size.numel() else 0.0)
        return _Error(FACTOR * self.worst + slack, FACTOR * self.mean + slack)


class _Values:
    """Evaluates nodes of a graph from known values; other placeholders are sampled when needed."""

    def __init__(self, known: dict[Node, Any]) -> None:
        self.known = known

    def of(self, node: Node) -> Any:
        todo = [node]
        while todo:
            last = todo[-1]
            missing = [n for n in last.all_input_nodes if n not in self.known]
            if last in self.known or not missing:
                todo.pop()
                if last not in self.known:
                    self.known[last] = self._compute(last)
            elif isinstance(last.meta.get("val"), (torch.SymInt, int)):
                self.known[last] = _hint(last.meta["val"])
            else:
                todo += missing
        return self.known[node]

    def _compute(self, node: Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)):
            return _hint(value)
        if node.op != "call_function":
            return _sample(value, SEED - 1)
        args, kwargs = tree_map(
            lambda a: self.known[a] if isinstance(a, Node) else a, (node.args, node.kwargs)
        )
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _hint(size: Any) -> int:
    if has_free_unbacked_symbols(size):
        raise ValueError(f"the size {size} is known only when the graph runs")
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _sample(fake: Any, seed: int) -> Tensor:
    """A tensor with the layout of ``fake`` and seeded elements, normal ones if it is floating."""
    generator = torch.Generator().manual_seed(seed)
    shape = [_hint(s) for s in fake.shape]
    strides = [_hint(s) for s in fake.stride()]
    if fake.dtype.is_floating_point:
        values = torch.randn(shape, generator=generator)
    else:
        low, high = _range_of(fake.dtype)
        values = torch.randint(low, high, shape, generator=generator)
    made = torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)
    return made.copy_(values)


def _range_of(dtype: torch.dtype) -> tuple[int, int]:
    """Values for integers: all of those that hold quantised data, small ones for indices."""
    if dtype is torch.bool:
        return 0, 2
    info = torch.iinfo(dtype)
    return (info.min, info.max + 1) if info.bits == 8 else (0, 2)
