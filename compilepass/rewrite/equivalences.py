"""The table of spellings that mean the same.

An entry is a function that takes a term and returns the canonical one, or ``None`` where it does
not apply; it is used on patterns and on graphs alike. To add one, write the function, name the
operation it looks at, and give it a line in ``tests/rewrite/test_equivalences.py``, which checks
both spellings numerically.

Entries marked *inexact* change the last bit of a floating point result (a division against a
multiplication with the reciprocal); all others are exact.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.utils._sympy.functions import IntTrueDiv

from .operations import PROMOTING, REDUCTIONS
from .term import Shape, Size, Term, const, product, same

__all__ = ["EQUIVALENCES", "Equivalence", "table"]


class Builder(Protocol):
    def make(
        self,
        op: str,
        args: tuple[Term, ...],
        params: tuple[tuple[str, object], ...] = (),
        *,
        like: Term,
        dtype: torch.dtype | None = None,
        shape: Shape | None = None,
        seen: tuple[Shape | None, ...] | None = None,
        absorb: tuple[Term, ...] = (),
    ) -> Term: ...


Equivalence = Callable[[Term, Builder], Term | None]


@dataclass(frozen=True)
class Entry:
    """One spelling. It looks at terms of ``ops`` and gives terms of ``makes`` in their stead.

    It need not be asked where no operand is one of ``of``, or no operand is a literal if it is
    about a ``number``. ``may_vanish`` says that it may give an operand itself.
    """

    name: str
    rewrite: Equivalence
    ops: frozenset[str]
    makes: frozenset[str]
    of: frozenset[str]
    number: bool
    may_vanish: bool


EQUIVALENCES: dict[str, list[Entry]] = defaultdict(list)

_HALF = (torch.bfloat16, torch.float16)


def equivalence(
    *ops: str, makes: str = "", of: str = "", number: bool = False, may_vanish: bool = False
) -> Callable[[Equivalence], Equivalence]:
    """Enter a function into the table (:class:`Entry`); ``makes`` and ``of`` are lists of words."""

    def add(fn: Equivalence) -> Equivalence:
        words = (frozenset(ops), frozenset(makes.split()), frozenset(of.split()))
        entry = Entry(fn.__name__, fn, *words, number, may_vanish)
        for op in ops:
            EQUIVALENCES[op].append(entry)
        return fn

    return add


#: type promotion and ``sum(x, dtype=…)`` write out their casts
_CASTING = Entry(
    "promotion",
    lambda t, b: None,
    PROMOTING | REDUCTIONS,
    frozenset(["cast"]),
    frozenset(),
    number=False,
    may_vanish=False,
)


@functools.cache
def makers_of(op: str) -> tuple[Entry, ...]:
    """The entries that give terms of ``op``."""
    every = [_CASTING, *(e for entries in EQUIVALENCES.values() for e in entries)]
    return tuple(dict.fromkeys(e for e in every if op in e.makes))


@functools.cache
def possible(op: str) -> frozenset[str]:
    """What a node of ``op`` may be in canonical form."""
    found, todo = {op}, [op]
    while todo:
        for entry in EQUIVALENCES.get(todo.pop(), ()):
            todo += entry.makes - found
            found |= entry.makes
    return frozenset(found)


@functools.cache
def may_vanish(op: str) -> bool:
    """Whether a node of ``op`` may be its operand in canonical form."""
    return any(entry.may_vanish for name in possible(op) for entry in EQUIVALENCES.get(name, ()))


@functools.cache
def made_at(op: str) -> frozenset[str]:
    """The operations of all terms that a node of ``op`` may be read as."""
    return possible(op) | (_CASTING.makes if op in _CASTING.ops else frozenset())


def table() -> list[tuple[str, tuple[str, ...], str]]:
    """Every entry as (name, operations it looks at, first line of its description)."""
    ops: dict[str, list[str]] = defaultdict(list)
    text: dict[str, str] = {}
    for op, entries in EQUIVALENCES.items():
        for entry in entries:
            ops[entry.name].append(op)
            text[entry.name] = (entry.rewrite.__doc__ or "").strip().splitlines()[0]
    return [(name, tuple(ops[name]), text[name]) for name in sorted(ops)]


@equivalence(*sorted(PROMOTING - {"maximum", "minimum"}), makes="add sub mul div", of="full")
def filled_tensor_is_number(t: Term, b: Builder) -> Term | None:
    """``x + torch.tensor(1.0)`` is ``x + 1.0``; the tensor may have other users."""
    args = tuple([_filled(a) if a.op == "full" else a for a in t.args])
    others = [a for a in args if not a.is_const]
    if len(args) != 2 or args == t.args or len(others) != 1 or others[0].dtype != t.dtype:
        return None
    seen = tuple([None if a.is_const else s for a, s in zip(args, t.seen, strict=True)])
    return b.make(t.op, args, t.params, like=t, seen=seen)


def _filled(term: Term) -> Term:
    """The number that a tensor without dimensions is filled with, if its dtype keeps it."""
    value = term.param("fill_value")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    exact = term.dtype in (torch.float32, torch.float64, torch.int64)
    return const(value) if is_number and exact and term.shape == () else term


def _is(term: Term, value: float) -> bool:
    return term.is_const and isinstance(term.value, (int, float)) and term.value == value


@equivalence("pow", makes="mul sqrt rsqrt", number=True)
def power_is_product_or_root(t: Term, b: Builder) -> Term | None:
    """``x ** 2`` is ``x * x``; ``x ** 0.5`` is ``sqrt(x)``; ``x ** -0.5`` is ``rsqrt(x)``."""
    x, exponent = t.args[0], t.args[1]
    if _is(exponent, 2):
        return b.make("mul", (x, x), like=t, seen=(t.seen[0], t.seen[0]))
    if _is(exponent, 0.5):
        return b.make("sqrt", (x,), like=t, seen=t.seen[:1])
    if _is(exponent, -0.5):
        return b.make("rsqrt", (x,), like=t, seen=t.seen[:1])
    return None


@equivalence("square", makes="mul")
def square_is_product(t: Term, b: Builder) -> Term | None:
    """``square(x)`` is ``x * x``."""
    return b.make("mul", (t.args[0], t.args[0]), like=t, seen=(t.seen[0], t.seen[0]))


@equivalence("rsub", makes="sub")
def rsub_is_sub(t: Term, b: Builder) -> Term | None:
    """``rsub(x, y)`` is ``y - x``."""
    return b.make("sub", t.args[::-1], t.params, like=t, seen=t.seen[::-1])


@equivalence("mul", "div", "add", "sub", number=True, may_vanish=True)
def identity_arithmetic(t: Term, b: Builder) -> Term | None:
    """``x * 1``, ``x / 1``, ``x + 0`` and ``x - 0`` are ``x``."""
    if len(t.args) != 2 or any(v not in (1, None) for _, v in t.params):
        return None
    neutral = 1 if t.op in ("mul", "div") else 0
    for x, other in ((0, 1), (1, 0)) if t.op in ("mul", "add") else ((0, 1),):
        value = t.args[x]
        if _is(t.args[other], neutral) and value.dtype == t.dtype and t.seen[x] == t.shape:
            return value
    return None


@equivalence("mul", makes="neg", number=True)
def product_with_minus_one(t: Term, b: Builder) -> Term | None:
    """``x * -1`` is ``-x``."""
    for x, other in ((0, 1), (1, 0)):
        value = t.args[x]
        if _is(t.args[other], -1) and value.dtype == t.dtype and t.seen[x] == t.shape:
            return b.make("neg", (value,), like=t, seen=(t.seen[x],))
    return None


@equivalence("div", makes="rsqrt mul", of="sqrt")
def division_by_root(t: Term, b: Builder) -> Term | None:
    """``x / sqrt(v)`` is ``x * rsqrt(v)``, ``1 / sqrt(v)`` is ``rsqrt(v)`` (inexact)."""
    if t.params and t.param("rounding_mode") is not None:
        return None
    x, y = t.args
    if y.op != "sqrt":
        return None
    root = b.make("rsqrt", y.args, like=y, seen=y.seen, absorb=(t,))
    return root if _is(x, 1) else b.make("mul", (x, root), like=t, seen=t.seen, absorb=(y,))


@equivalence("reciprocal", makes="rsqrt", of="sqrt")
def reciprocal_of_root(t: Term, b: Builder) -> Term | None:
    """``reciprocal(sqrt(v))`` is ``rsqrt(v)`` (inexact)."""
    root = t.args[0]
    if root.op != "sqrt":
        return None
    return b.make("rsqrt", root.args, like=t, seen=root.seen, absorb=(root,))


@equivalence("div", makes="reciprocal", number=True)
def one_over_is_reciprocal(t: Term, b: Builder) -> Term | None:
    """``1 / x`` is ``reciprocal(x)``."""
    if _is(t.args[0], 1) and t.param("rounding_mode") is None:
        return b.make("reciprocal", t.args[1:], like=t, seen=t.seen[1:])
    return None


@equivalence("mul", makes="div", of="reciprocal")
def product_with_reciprocal(t: Term, b: Builder) -> Term | None:
    """``x * reciprocal(y)`` is ``x / y`` (inexact)."""
    for x, y in ((0, 1), (1, 0)):
        inverse = t.args[y]
        if inverse.op == "reciprocal" and not t.args[x].is_const:
            return b.make(
                "div",
                (t.args[x], inverse.args[0]),
                like=t,
                seen=(t.seen[x], t.seen[y]),
                absorb=(inverse,),
            )
    return None


@equivalence("div", makes="mean", of="sum", number=True)
def sum_over_count_is_mean(t: Term, b: Builder) -> Term | None:
    """``sum(x, dim) / n`` is ``mean(x, dim)`` where ``n`` is the size of ``dim``."""
    total, count = t.args
    if not count.is_const or t.param("rounding_mode") is not None:
        return None
    return _mean(t, total, count.value, b)


@equivalence("mul", makes="mean", of="sum", number=True)
def sum_times_inverse_count_is_mean(t: Term, b: Builder) -> Term | None:
    """``sum(x, dim) * (1 / n)`` is ``mean(x, dim)`` where ``dim`` has ``n`` elements (inexact)."""
    for total, inverse in (t.args, t.args[::-1]):
        if (count := _inverted(inverse)) is not None:
            return _mean(t, total, count, b)
    return None


def _mean(t: Term, total: Term, count: object, b: Builder) -> Term | None:
    if total.op != "sum" or (shape := total.seen[0]) is None:
        return None
    if not same(product([shape[d] for d in total.param("dim")]), count):
        return None
    return b.make("mean", total.args, total.params, like=t, seen=total.seen, absorb=(total,))


@equivalence("getitem", makes="mean sub mul", of="var_mean")
def var_mean_is_two_means(t: Term, b: Builder) -> Term | None:
    """``var_mean(x, correction=0)`` is a variance as below and ``mean(x)`` (inexact)."""
    source = t.args[0]
    if source.op != "var_mean":
        return None
    if t.param("index") == 1:
        dims = (("dim", source.param("dim")),)
        return b.make("mean", source.args, dims, like=t, seen=source.seen, absorb=(source,))
    return _variance(t, source, b)


@equivalence("var", makes="mean sub mul")
def variance_is_mean(t: Term, b: Builder) -> Term | None:
    """``var(x, correction=0)`` in float32 is ``mean((x - mean(x)) ** 2)`` (inexact)."""
    return _variance(t, t, b)


def _variance(t: Term, source: Term, b: Builder) -> Term | None:
    shape = source.seen[0]
    if source.param("correction") != 0 or shape is None or t.dtype in _HALF:
        return None
    dims = source.param("dim")
    kept = tuple([1 if d in dims else n for d, n in enumerate(shape)])
    within = partial(b.make, like=t, absorb=(source,) if source is not t else ())
    mean = within("mean", source.args, (("dim", dims),), seen=(shape,))
    apart = (source.args[0], mean)
    off = within("sub", apart, (("alpha", 1),), shape=shape, seen=(shape, kept))
    square = within("mul", (off, off), shape=shape)
    return within("mean", (square,), (("dim", dims),), seen=(shape,))


def _inverted(term: Term) -> Size | None:
    """The whole number ``n`` of ``1 / n``: of a size, or of a literal, rounded or not."""
    if term.is_const and isinstance(term.value, IntTrueDiv) and term.value.args[0] == 1:
        return term.value.args[1]
    if not term.is_const or not isinstance(term.value, float) or not 0 < term.value < 1:
        return None
    count = round(1 / term.value)
    return count if abs(count * term.value - 1) < 2.0**-23 else None


@equivalence("mul", makes="div", of="amax clamp_min", number=True)
def largest_times_inverse_is_quotient(t: Term, b: Builder) -> Term | None:
    """``max(|x|) * (1 / n)`` is ``max(|x|) / n``, the scale of a quantisation (inexact)."""
    for x, y in ((0, 1), (1, 0)):
        count = _inverted(t.args[y])
        if count is not None and _largest(t.args[x]) is not None:
            return b.make("div", (t.args[x], const(count)), like=t, seen=(t.seen[x], None))
    return None


def _largest(term: Term) -> Term | None:
    """The ``amax`` of magnitudes that ``term`` is, with or without a lower bound."""
    if term.op == "clamp_min":
        term = term.args[0]
    return term if term.op == "amax" and term.args[0].op == "abs" else None


@equivalence("clamp_min", "clamp_max", of="round", may_vanish=True)
def bounds_of_symmetric_quantisation(t: Term, b: Builder) -> Term | None:
    """``round(x / s)`` with ``s = max(|x|) / n`` needs no bounds of ``n`` or more."""
    steps = t.args[0]
    if len(t.args) != 1 or steps.op != "round" or steps.args[0].op != "div":
        return None
    x, scale = steps.args[0].args
    largest = _largest(scale.args[0]) if scale.op == "div" else None
    if largest is None or largest.args[0].args[0] is not x or not scale.args[1].is_const:
        return None
    shape, dims = largest.seen[0], largest.param("dim")
    if shape is None or steps.args[0].seen[0] != shape:
        return None
    if steps.args[0].seen[1] != tuple(1 if d in dims else n for d, n in enumerate(shape)):
        return None  # another row's scale
    low, high = t.param("min"), t.param("max")
    bound = high if low is None else -low
    count = scale.args[1].value
    numbers = isinstance(bound, (int, float)) and isinstance(count, (int, float))
    return steps if numbers and 0 < count <= bound else None


@equivalence("sigmoid", makes="neg exp add reciprocal")
def sigmoid_is_exp(t: Term, b: Builder) -> Term | None:
    """``sigmoid(x)`` is ``1 / (1 + exp(-x))``."""
    negative = b.make("neg", t.args, like=t, seen=t.seen)
    grown = b.make("exp", (negative,), like=t)
    below = b.make("add", (grown, const(1)), (("alpha", 1),), like=t, seen=(t.shape, None))
    return b.make("reciprocal", (below,), like=t)


@equivalence("div", makes="cast neg exp add div", of="add")
def silu_in_half_precision(t: Term, b: Builder) -> Term | None:
    """``x / (1 + exp(-x))`` of half-precision values is computed in float32 (inexact).

    Inductor keeps the values between pointwise operations in float32, and ``F.silu`` is written
    that way. Other operations keep their roundings, which tell one norm from another.
    """
    if t.dtype not in _HALF or len(t.args) != 2:
        return None
    x, below = t.args
    grown = next((a for a in below.args if a.op == "exp"), None) if below.op == "add" else None
    if grown is None or not any(_is(a, 1) for a in below.args):
        return None
    negative = grown.args[0]
    if negative.op != "neg" or negative.args[0] is not x:
        return None
    wide = partial(b.make, like=t, dtype=torch.float32)
    x32 = wide("cast", (x,), (("dtype", torch.float32),))
    exp32 = wide("exp", (wide("neg", (x32,)),))
    below32 = wide("add", (exp32, const(1)), below.params, seen=(t.shape, None))
    quotient = wide("div", (x32, below32), t.params)
    inside = (below, grown, negative)
    return b.make("cast", (quotient,), (("dtype", t.dtype),), like=t, absorb=inside)


@equivalence("clamp", makes="clamp_min clamp_max", may_vanish=True)
def clamp_is_two_bounds(t: Term, b: Builder) -> Term | None:
    """``clamp(x, lo, hi)`` is ``clamp_max(clamp_min(x, lo), hi)``."""
    out = t.args[0]
    if len(t.args) != 1:
        return None
    for op, name in (("clamp_min", "min"), ("clamp_max", "max")):
        bound = t.param(name)
        if bound is not None:
            out = b.make(op, (out,), ((name, bound),), like=t)
    return out


@equivalence("addmm", makes="mm add")
def addmm_is_mm_and_add(t: Term, b: Builder) -> Term | None:
    """``addmm(bias, a, b)`` is ``a @ b + bias`` (inexact).

    A factor that is not 1 stays an argument, which no ``a @ b`` and no sum of a pattern has.
    """
    bias, left, right = t.args
    alpha, beta = ((name, t.param(name)) for name in ("alpha", "beta"))
    matrix = b.make("mm", (left, right), _unless_one(alpha), like=t, seen=t.seen[1:])
    params = (("alpha", 1), *_unless_one(beta))
    return b.make("add", (matrix, bias), params, like=t, seen=(matrix.shape, t.seen[0]))


def _unless_one(factor: tuple[str, object]) -> tuple[tuple[str, object], ...]:
    return () if factor[1] == 1 else (factor,)


@equivalence("getitem", makes="amax amin", of="max min")
def values_of_max_are_amax(t: Term, b: Builder) -> Term | None:
    """The values of ``max(x, dim)`` and ``min(x, dim)`` are ``amax`` and ``amin``."""
    pair = t.args[0]
    if pair.op not in ("max", "min") or t.param("index") != 0 or not pair.seen[0]:
        return None
    dim = pair.param("dim") % len(pair.seen[0])
    params = (("dim", (dim,)),)
    return b.make(f"a{pair.op}", pair.args, params, like=t, seen=pair.seen, absorb=(pair,))


@equivalence("getitem", makes="slice", of="split split_with_sizes")
def split_is_slice(t: Term, b: Builder) -> Term | None:
    """One part of ``split``, ``chunk`` or ``split_with_sizes`` is a ``slice``."""
    parts = t.args[0]
    if parts.op not in ("split", "split_with_sizes") or not parts.seen or parts.seen[0] is None:
        return None
    dim, index = parts.param("dim"), t.param("index")
    total = parts.seen[0][dim]
    sizes = parts.param("split_size") or parts.param("split_sizes")
    if isinstance(sizes, tuple):
        start = sum(sizes[:index])
        end = start + sizes[index]
    else:
        start = sizes * index
        end = start + t.shape[dim] if t.shape is not None else total
    params = (("dim", dim), ("start", start), ("end", end), ("step", 1))
    return b.make("slice", parts.args, params, like=t, seen=parts.seen)


@equivalence("getitem", makes="select", of="unbind")
def unbound_is_selected(t: Term, b: Builder) -> Term | None:
    """One part of ``unbind`` is a ``select``."""
    parts = t.args[0]
    if parts.op != "unbind":
        return None
    params = (("dim", parts.param("dim")), ("index", t.param("index")))
    return b.make("select", parts.args, params, like=t, seen=parts.seen)


@equivalence("select", makes="slice")
def select_is_slice(t: Term, b: Builder) -> Term | None:
    """``select(x, dim, i)`` is a slice of one element."""
    shape, dim, index = t.seen[0], t.param("dim"), t.param("index")
    if shape is None or not isinstance(index, int):
        return None
    start = index if index >= 0 else shape[dim] + index
    params = (("dim", dim), ("start", start), ("end", start + 1), ("step", 1))
    return b.make("slice", t.args, params, like=t, seen=t.seen)


@equivalence("slice", makes="slice")
def element_of_pairs_is_every_second(t: Term, b: Builder) -> Term | None:
    """``x[..., i]`` of rows of two is ``x[..., i::2]`` of the rows seen as one."""
    shape, dim = t.seen[0], t.param("dim")
    if shape is None or len(shape) < 2 or dim != len(shape) - 1 or shape[-1] != 2:
        return None
    if t.param("step") != 1 or t.param("end") != t.param("start") + 1:
        return None
    merged = (*shape[:-2], shape[-2] * 2)
    params = (("dim", dim - 1), ("start", t.param("start")), ("end", merged[-1]), ("step", 2))
    return b.make("slice", t.args, params, like=t, seen=(merged,))


@equivalence("slice", makes="slice")
def slice_with_the_dims_after_it(t: Term, b: Builder) -> Term | None:
    """A slice is one of the dimension and all after it, seen as a single last one."""
    shape, dim = t.seen[0], t.param("dim")
    if shape is None or t.param("step") != 1 or dim == len(shape) - 1:
        return None
    after = product(shape[dim + 1 :])
    params = (
        ("dim", dim),
        ("start", t.param("start") * after),
        ("end", t.param("end") * after),
        ("step", 1),
    )
    return b.make("slice", t.args, params, like=t, seen=((*shape[:dim], shape[dim] * after),))
