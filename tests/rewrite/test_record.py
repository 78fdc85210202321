"""The recorder works out layouts itself where that is simple: as PyTorch would."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from compilepass import inductor
from compilepass.kernels import native
from compilepass.rewrite import record as recorder
from compilepass.rewrite import trace as tracer
from compilepass.rewrite.layout import layout
from compilepass.rewrite.rule import Rule
from compilepass.rewrite.trace import trace


def broadcast(x: Tensor, weight: Tensor, column: Tensor) -> Tensor:
    return torch.maximum(x * weight, column) - (column / x).tanh() + weight.exp() * 2


def turned(x: Tensor) -> Tensor:
    return (x.t() * 2).neg() + x.t()


def widened(x: Tensor, weight: Tensor) -> Tensor:
    return (x.to(torch.bfloat16) * weight.to(torch.bfloat16)).float() + x


def counted(x: Tensor) -> Tensor:
    return (x > 0) * 3 + x.to(torch.int32) * 2


def sliced(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return turned * x + torch.cat((turned[..., 3:], x.exp()), -1)[..., :half].neg().sum()


def every_other(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * x


def heads(x: Tensor) -> Tensor:
    turned = (x * 2).transpose(1, 2)
    return torch.cat((turned.neg(), turned * turned), -1)


def crossed(x: Tensor) -> Tensor:
    return x.exp() + x.t()


def head_table(x: Tensor, table: Tensor) -> Tensor:
    turned = x.transpose(1, 2)
    return turned * table[:, None] + table[:, None] * turned.neg()


def reduced(x: Tensor) -> Tensor:
    turned = x.transpose(0, 1)
    over = turned.pow(2).mean(-1, keepdim=True) + x.amax(0, keepdim=True).transpose(0, 1)
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return over + (variance * mean).transpose(0, 1) + turned.sum(-1).mean()


def joined_in_turn(x: Tensor) -> Tensor:
    turned = x.permute(0, 3, 1, 2)
    return torch.cat((turned, turned.neg()), -1)


def out_of_integers(x: Tensor) -> Tensor:
    turned = x.permute(1, 0)
    return turned.to(torch.int8).float() @ x + x.to(torch.uint8).t().to(torch.float32).sum()


def summed_as(x: Tensor) -> Tensor:
    whole = x.to(torch.int8)
    return whole.sum(0, keepdim=True, dtype=torch.int32) + whole.sum(0, keepdim=True)


def halves_exchanged(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = x.transpose(1, 2)
    return torch.cat((-turned[..., half:], turned[..., :half]), -1) + turned


def other_order_second(x: Tensor) -> Tensor:
    turned = x.transpose(1, 2)
    return (turned * 2 + turned.contiguous()) - (turned.contiguous() + turned)


ROWS, WEIGHT, COLUMN = ("T", "H"), ("H",), ("T", 1)
CASES: dict[str, tuple[Any, dict[str, tuple[Any, ...]]]] = {
    "broadcast": (broadcast, {"x": ROWS, "weight": WEIGHT, "column": COLUMN}),
    "turned": (turned, {"x": ROWS}),
    "widened": (widened, {"x": ROWS, "weight": WEIGHT}),
    "sliced": (sliced, {"x": ROWS}),
    "every other": (every_other, {"x": ("T", "2*H")}),
    "heads": (heads, {"x": ("B", "S", "N", "H")}),
    "crossed": (crossed, {"x": ("H", "H")}),
    "head table": (head_table, {"x": ("B", "S", "N", "H"), "table": ("B", "S", "H")}),
    "reduced": (reduced, {"x": ("S", "N", "H")}),
    "joined in turn": (joined_in_turn, {"x": ("B", "S", "N", "H")}),
    "out of integers": (out_of_integers, {"x": ("H", "H")}),
    "other order second": (other_order_second, {"x": ("S", "N", "H")}),
    "summed as": (summed_as, {"x": ROWS}),
    "halves exchanged": (halves_exchanged, {"x": ("S", "N", "H")}),
    "halves of heads": (halves_exchanged, {"x": ("B", "S", "N", "H")}),
    "integers": (counted, {"x": ROWS}),
    "norm": (lambda x, weight: native.rms_norm(x, weight, 1e-5), {"x": ROWS, "weight": WEIGHT}),
    "gate": (native.gelu_and_mul, {"x": ("T", "2*H")}),
}


@pytest.mark.parametrize("name", CASES)
def test_recorded_layouts_are_those_that_pytorch_computes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "_spare", [])  # symbols are named alike
    ours, skipped = layouts(name)
    monkeypatch.setattr(recorder, "known_result", lambda *args: None)
    monkeypatch.setattr(tracer, "_spare", [])
    theirs, _ = layouts(name)
    assert ours == theirs
    assert skipped


def layouts(name: str) -> tuple[list[Any], int]:
    """The recorded operations with dtype and shape, and how many PyTorch was not asked for."""
    fn, inputs = CASES[name]
    rule = Rule(fn, fn, inputs)
    skipped = 0
    known = recorder.known_result
    seen: list[Any] = []

    def watched(*args: Any) -> Any:
        nonlocal skipped
        out = known(*args)
        skipped += out is not None
        return out

    recorder.known_result = watched
    add = recorder._Recorder.add

    def noted(self: Any, op: str, name: str, target: Any, args: Any, kwargs: Any, val: Any) -> Any:
        if isinstance(val, Tensor):
            seen.append((target, at_one_size(layout(val))))
        return add(self, op, name, target, args, kwargs, val)

    recorder._Recorder.add = noted  # type: ignore[method-assign]
    try:
        decompositions = inductor.engine()._decompositions
        specs = rule.specs(torch.float32)
        trace(fn, specs, (), rule.fixed, decompositions=decompositions, what="a case")
    finally:
        recorder.known_result, recorder._Recorder.add = known, add  # type: ignore[method-assign]
    return seen, skipped


def at_one_size(kind: Any) -> Any:
    """A layout with a number for each symbol; PyTorch's strides also allow for sizes of 0."""
    shape, strides, *rest = kind

    def numbers(sizes: Any) -> list[int]:
        exprs = [sympy.sympify(size) for size in sizes]
        return [
            int(e.xreplace({x: sympy.Integer(100 + 2 * int(x.name[1:])) for x in e.free_symbols}))
            for e in exprs
        ]

    return numbers(shape), numbers(strides), *rest
