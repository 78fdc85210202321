"""What is known of single operations: names, kinds, and their arguments in normal form."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import sympy
import torch
from torch.fx import Node

from .record import Call
from .term import Shape, product, same, size_of

T = TypeVar("T")

__all__ = [
    "LOOKED_THROUGH",
    "OPERAND_SLOTS",
    "PROMOTING",
    "REDUCTIONS",
    "VIEWS",
    "is_kernel",
    "is_number",
    "is_split",
    "keeps_order",
    "kind_of",
    "normal_params",
    "op_name",
    "plain",
    "schema_slots",
    "widened",
]

VIEWS = frozenset(
    [
        "reshape",
        "view",
        "_unsafe_view",
        "squeeze",
        "unsqueeze",
        "alias",
        "detach",
        "clone",
        "contiguous",
        "lift_fresh_copy",
        "flatten",
    ]
)
SPLITS = frozenset(["split", "split_with_sizes", "unbind"])
#: what may leave all elements as they are and in their order
LOOKED_THROUGH = VIEWS | {"cast", "expand", "permute", "slice", "t", "transpose"}
REDUCTIONS = frozenset(
    [
        "mean",
        "sum",
        "amax",
        "amin",
        "prod",
        "any",
        "all",
        "argmax",
        "argmin",
        "var",
        "std",
        "var_mean",
    ]
)
_ALONG = frozenset(
    [
        "slice",
        "select",
        "cat",
        "split",
        "split_with_sizes",
        "_softmax",
        "softmax",
        "cumsum",
        "index_select",
        "gather",
        "unbind",
        "sort",
        "topk",
    ]
)
_NAMES = {
    "convert_element_type": "cast",
    "clamp_min": "clamp_min",
    "true_divide": "div",
    "multiply": "mul",
}
OPERAND_SLOTS = frozenset({"other", "exponent"})
PROMOTING = frozenset(["add", "sub", "mul", "div", "maximum", "minimum"])
_WIDENING = {
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
    torch.int8: {torch.int16, torch.int32, torch.int64, torch.float32, torch.float64},
}
_kinds: dict[str, str] = {
    **dict.fromkeys(REDUCTIONS, "reduction"),
    **dict.fromkeys(_ALONG, "along"),
    **dict.fromkeys(
        ["cast", "neg", "exp", "add", "mul", "div", "reciprocal", "rsqrt", "sqrt"], "pointwise"
    ),
}


def kind_of(op: str) -> str:
    """How an operation treats shapes: ``pointwise``, ``reduction``, ``along`` a dim, ``exact``."""
    return _kinds.get(op, "exact")


def _of_target(fn: Callable[[Any], T]) -> Callable[[Any], T]:
    """Remember what a function says of a graph's target; the hash of an overload takes longer."""
    known: dict[int, tuple[Any, T]] = {}  # the target is kept, so that its id stays its own

    @functools.wraps(fn)
    def look_up(target: Any) -> T:
        entry = known.get(id(target))
        if entry is None:
            entry = known[id(target)] = target, fn(target)
        return entry[1]

    return look_up


@_of_target
def schema_slots(op: Any) -> tuple[tuple[str, Any], ...]:
    """The arguments of an op by name, with their defaults."""
    return tuple((a.name, a.default_value) for a in op._schema.arguments)


@_of_target
def is_kernel(target: Any) -> bool:
    """Whether this is an op outside of PyTorch's own namespaces, which may have a native form."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims")


@_of_target
def op_name(target: Any) -> str:
    """One name for all overloads of an aten or prims op; the full name of any other target."""
    if target is operator.getitem:
        return "getitem"
    if not isinstance(target, torch._ops.OpOverload) or is_kernel(target):
        return str(target)
    packet: str = target.overloadpacket.__name__
    name = _NAMES.get(packet, packet)
    if torch.Tag.pointwise in target.tags:
        _kinds.setdefault(name, "pointwise")
    return name


def is_split(node: Node) -> bool:
    """Whether a node only takes a tensor apart: nobody needs it but through its parts."""
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and op_name(op) in SPLITS


def widened(dtype: torch.dtype | None) -> set[torch.dtype]:
    """The dtypes that hold every value of ``dtype``."""
    return _WIDENING.get(dtype, set()) if dtype is not None else set()


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number, known or symbolic, and no truth value."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, sympy.Expr)) and not (
        isinstance(value, bool)
    )


def plain(value: Any) -> Any:
    """Sizes and numbers as Python numbers or expressions, lists as tuples, symbolic nodes read."""
    if value is None or type(value) in (int, float, bool, str):
        return value
    if isinstance(value, (Node, Call)):
        value = value.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return size_of(value) if isinstance(value, torch.SymInt) else value.node.expr
    if isinstance(value, (list, tuple)):
        return tuple(plain(v) for v in value)
    return value


def _positive(dim: Any, rank: int) -> int:
    return int(dim) + rank if dim < 0 else int(dim)


def normal_params(
    name: str, params: list[tuple[str, Any]], seen: tuple[Shape | None, ...]
) -> tuple[tuple[str, Any], ...]:
    """Arguments that are no tensors: dims counted from the front, slices within bounds."""
    shape = seen[0] if seen else None
    if shape is None:
        return tuple(params)
    rank = len(shape)
    if name in REDUCTIONS:
        given = dict(params)
        dim = given.get("dim")
        dims = (
            range(rank) if dim is None or dim == () else (dim if isinstance(dim, tuple) else (dim,))
        )
        given["dim"] = tuple(sorted(_positive(d, rank) for d in dims))
        given.pop("keepdim", None)  # the elements and their order are the same either way
        return tuple(given.items())
    if name == "slice":
        return _normal_slice(dict(params), shape)
    if name in _ALONG:
        return tuple((k, _positive(v, rank) if k == "dim" else v) for k, v in params)
    if name == "permute":
        return tuple((k, tuple(_positive(d, rank) for d in v)) for k, v in params)
    return tuple(params)


def _normal_slice(given: dict[str, Any], shape: Shape) -> tuple[tuple[str, Any], ...]:
    dim = _positive(given.get("dim") or 0, len(shape))
    size = shape[dim]

    def bound(value: Any, default: Any) -> Any:
        if value is None or (isinstance(value, int) and value >= (1 << 62)):
            return default
        if isinstance(value, int) and value < 0:
            value = size + value
        if isinstance(value, int) and isinstance(size, int):
            return min(max(value, 0), size)
        return value

    start, end = bound(given.get("start"), 0), bound(given.get("end"), size)
    return ("dim", dim), ("start", start), ("end", end), ("step", given.get("step") or 1)


def keeps_order(name: str, seen: Shape, out: Shape, params: dict[str, Any]) -> bool:
    """Whether a permutation, slice or expand gives all elements in the same row-major order."""
    if name in ("permute", "transpose", "t"):
        rank = len(seen)
        order = list(range(rank))
        if name == "permute":
            order = [_positive(d, rank) for d in params["dims"]]
        elif rank > 1:
            a, b = (0, 1) if name == "t" else (params["dim0"], params["dim1"])
            a, b = _positive(a, rank), _positive(b, rank)
            order[a], order[b] = order[b], order[a]
        moved = [d for d in order if seen[d] != 1]
        return moved == sorted(moved)
    return same(product(seen), product(out))
