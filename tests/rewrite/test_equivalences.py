"""Each entry of the table of equivalences: both spellings have one form, and one value.

An entry that its description calls inexact may differ in the last bits, the others in none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compilepass.rewrite import equivalences
from compilepass.rewrite.equivalences import EQUIVALENCES, Entry
from compilepass.rewrite.term import Term
from compilepass.rewrite.trace import TensorSpec, trace

Function = Callable[..., Tensor]
SHAPE = (6, 10)


@dataclass(frozen=True)
class Case:
    """Two spellings of one value of ``x``, and of ``y`` and ``z`` where they take these."""

    one: Function
    other: Function
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = (SHAPE,)


def case(one: Function, other: Function, *shapes: tuple[int, ...]) -> Case:
    return Case(one, other, shapes=shapes or (SHAPE,))


def _quantised(x: Tensor) -> Tensor:
    return torch.round(x / (x.abs().amax(-1, keepdim=True) / 127))


def _variance(x: Tensor) -> Tensor:
    off = x - x.mean(-1, keepdim=True)
    return (off * off).mean(-1)


def _var_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x, -1, correction=0)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


#: a cast in the form in which compiled graphs have it
_cast = torch.ops.prims.convert_element_type


CASES: dict[str, list[Case]] = {
    "addmm_is_mm_and_add": [
        case(torch.addmm, lambda x, y, z: torch.mm(y, z) + x, (7,), (6, 10), (10, 7)),
    ],
    "bounds_of_symmetric_quantisation": [
        case(lambda x: _quantised(x).clamp(-128, 127), _quantised),
        case(lambda x: _quantised(x).clamp_max(127), lambda x: _quantised(x).clamp(-127, 127)),
    ],
    "clamp_is_two_bounds": [
        case(lambda x: torch.clamp(x, -1, 1), lambda x: x.clamp_min(-1).clamp_max(1)),
        case(lambda x: torch.clamp(x, min=0.5), lambda x: x.clamp_min(0.5)),
    ],
    "division_by_root": [
        case(lambda x: x / torch.sqrt(x * x), lambda x: x * torch.rsqrt(x * x)),
        case(lambda x: 1 / torch.sqrt(x * x), lambda x: torch.rsqrt(x * x)),
    ],
    "filled_tensor_is_number": [
        case(lambda x: (x + torch.full((), 0.5)) * torch.full((), 3.0), lambda x: (x + 0.5) * 3.0),
        case(lambda x: x / torch.full((), 2.0) - torch.full((), 1), lambda x: x / 2.0 - 1),
    ],
    "identity_arithmetic": [
        case(lambda x: (x * 1 + 0 - 0) / 1 + x, lambda x: x + x),
        case(lambda x: 0 + 1 * x + x, lambda x: x + x),
    ],
    "largest_times_inverse_is_quotient": [
        case(lambda x: x.abs().amax(-1) * (1 / 127), lambda x: x.abs().amax(-1) / 127),
        case(
            lambda x: (1 / 127) * x.abs().amax(-1).clamp_min(1e-5),
            lambda x: x.abs().amax(-1).clamp_min(1e-5) / 127,
        ),
    ],
    "one_over_is_reciprocal": [case(lambda x: 1 / x, torch.reciprocal)],
    "power_is_product_or_root": [
        case(lambda x: x**2, lambda x: x * x),
        case(lambda x: (x * x) ** 0.5, lambda x: torch.sqrt(x * x)),
        case(lambda x: (x * x) ** -0.5, lambda x: torch.rsqrt(x * x)),
    ],
    "product_with_minus_one": [
        case(lambda x: -1 * x, torch.neg),
        case(lambda x: x * -1.0, torch.neg),
    ],
    "product_with_reciprocal": [
        case(lambda x, y: x * torch.reciprocal(y), torch.div, SHAPE, SHAPE),
        case(lambda x, y: torch.reciprocal(y) * x, torch.div, SHAPE, SHAPE),
    ],
    "reciprocal_of_root": [
        case(lambda x: torch.sqrt(x * x).reciprocal(), lambda x: torch.rsqrt(x * x)),
    ],
    "rsub_is_sub": [case(lambda x, y: torch.rsub(x, y), lambda x, y: y - x, SHAPE, SHAPE)],
    "element_of_pairs_is_every_second": [
        case(lambda x: x.unflatten(-1, (-1, 2)).unbind(-1)[1], lambda x: x[:, 1::2]),
        case(lambda x: x.unflatten(-1, (-1, 2))[..., 0], lambda x: x[:, ::2]),
    ],
    "select_is_slice": [
        case(lambda x: x[:, 3], lambda x: x[:, 3:4].squeeze(1)),
        case(lambda x: x[:, -1], lambda x: x[:, 9:].squeeze(1)),
    ],
    "sigmoid_is_exp": [case(torch.sigmoid, lambda x: 1 / (torch.exp(-x) + 1))],
    "silu_in_half_precision": [
        Case(
            _silu,
            lambda x: _cast(_silu(_cast(x, torch.float32)), x.dtype),
            dtype,
        )
        for dtype in (torch.bfloat16, torch.float16)
    ],
    "slice_with_the_dims_after_it": [
        case(lambda x: x[:, 1:2], lambda x: x.flatten(1)[:, 5:10].unflatten(1, (1, 5)), (6, 2, 5)),
    ],
    "split_is_slice": [
        case(lambda x: x.split(5, -1)[1], lambda x: x[:, 5:]),
        case(lambda x: x.split([4, 6], 1)[1], lambda x: x[:, 4:]),
    ],
    "square_is_product": [case(torch.square, lambda x: x * x)],
    "sum_over_count_is_mean": [
        case(lambda x: x.sum(-1) / 10, lambda x: x.mean(-1)),
        case(lambda x: x.sum((0, 1)) / 60, torch.mean),
    ],
    "sum_times_inverse_count_is_mean": [
        case(lambda x: x.sum(-1) * (1 / 10), lambda x: x.mean(-1)),
    ],
    "unbound_is_selected": [case(lambda x: x.unbind(1)[1], lambda x: x[:, 1], (6, 2, 5))],
    "values_of_max_are_amax": [
        case(lambda x: x.max(-1).values, lambda x: x.amax(-1)),
        case(lambda x: x.min(0, keepdim=True)[0], lambda x: x.amin(0, keepdim=True)),
    ],
    "var_mean_is_two_means": [
        case(lambda x: _var_mean(x)[0], _variance),
        case(lambda x: _var_mean(x)[1], lambda x: x.mean(-1)),
    ],
    "variance_is_mean": [case(lambda x: x.var(-1, correction=0), _variance)],
}
TABLE = {name: description for name, _, description in equivalences()}
ALL = [
    pytest.param(name, c, id=f"{name}-{i}") for name, cs in CASES.items() for i, c in enumerate(cs)
]


def test_every_entry_of_the_table_is_tested() -> None:
    assert sorted(CASES) == sorted(TABLE)


@pytest.mark.parametrize(("name", "case"), ALL)
def test_both_spellings_have_one_form(name: str, case: Case) -> None:
    one, other = _forms(case)
    assert one == other


@pytest.mark.parametrize(("name", "case"), ALL)
def test_both_spellings_have_one_value(name: str, case: Case) -> None:
    torch.manual_seed(0)
    args = [torch.randn(shape).to(case.dtype) for shape in case.shapes]
    one, other = case.one(*args), case.other(*args)
    if "(inexact)" in TABLE[name]:
        torch.testing.assert_close(one, other)
    else:
        assert torch.equal(one, other)


def test_silu_of_exp_keeps_its_form_in_float32() -> None:
    """The entry for half precision adds casts where there is something to round, not elsewhere."""
    spec = {"x": TensorSpec(SHAPE, torch.float32)}
    traced = trace(lambda x: _silu(x), spec, (), {}, decompositions={}, what="silu")
    assert not any(t.op == "cast" for t in traced.terms)


def _forms(case: Case) -> tuple[list[str], list[str]]:
    names = "xyz"[: len(case.shapes)]
    specs = {n: TensorSpec(s, case.dtype) for n, s in zip(names, case.shapes, strict=True)}

    def form(fn: Function) -> list[str]:
        traced = trace(
            lambda **given: fn(*given.values()), specs, (), {}, decompositions={}, what="a case"
        )
        return _form(traced.outputs[0])

    return form(case.one), form(case.other)


def _form(term: Term) -> list[str]:
    """A term as text, operations by the order in which they are reached; commuted ones sorted."""
    lines: list[str] = []
    known: dict[Term, str] = {}

    def visit(t: Term) -> str:
        if t.is_const:
            return repr(float(t.value))
        if t not in known:
            args = [visit(a) for a in t.args]
            if t.op in ("mul", "add"):
                args.sort()
            known[t] = f"{t.op}{len(known)}"
            lines.append(f"{t.op} {args} {t.params} {t.dtype}")
        return known[t]

    visit(term)
    return lines


def test_what_an_entry_makes_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are found by what may compute them, so an entry that says less hides some."""
    made: dict[str, set[str]] = {name: set() for name in CASES}
    says = {e.name: e.makes for entries in EQUIVALENCES.values() for e in entries}

    def watched(entry: Entry) -> Entry:
        def rewrite(t: Term, b: Any) -> Term | None:
            def make(op: str, *args: Any, **kwargs: Any) -> Any:
                made[entry.name].add(op)
                return b.make(op, *args, **kwargs)

            return entry.rewrite(t, SimpleNamespace(make=make))  # type: ignore[arg-type]

        return replace(entry, rewrite=rewrite)

    for op, entries in EQUIVALENCES.items():
        monkeypatch.setitem(EQUIVALENCES, op, [watched(entry) for entry in entries])
    for cases in CASES.values():
        for case in cases:
            _forms(case)
    assert {name: ops - says[name] for name, ops in made.items() if ops - says[name]} == {}
    assert sum(map(bool, made.values())) > len(made) / 2
