"""The shipped ops with inputs for them, and what they compute in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from compilepass.kernels.native import FP8
from compilepass.kernels.native.fused_quantisation import QUANTISATIONS, SOURCES

EPS = 1e-6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((0, 16), (1, 7), (7, 63), (257, 16), (3, 1), (4096,), (2, 3, 1000), (2, 4096))

# Of a result against fp64: a few roundings to the dtype, relative to the result.
FP64_RTOL = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
FP64_ATOL = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
# Of a kernel against native: a value may round to its neighbour, where a sum was taken in another
# order, and a product of it then to the next but one.
TWO_ULP = {torch.float32: 4e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
# GELU's negative tail, where native loses digits to cancellation and the kernel does not.
GELU_ATOL = 2e-5
# A row without variance, of which native leaves the rounding of mean / deviation.
LAYER_NORM_ATOL = 2e-3
# the flags of ``rotate``
ROTATIONS = ("interleaved", "per_pair", "wide")
# what subtracts products of values that a norm may have rounded to a neighbour
NORMED_AND_ROTATED = ("qk_norm_rope", "rms_norm_rotate")


@dataclass(frozen=True)
class Numbers:
    """What quantised results stand for, how far from it they may be, and the other results."""

    values: Tensor
    within: Tensor
    rest: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Case:
    """``inputs(rows shape, dtype)`` makes arguments, ``oracle(*fp64 arguments)`` the results.

    ``numbers(arguments, results)`` reads the results of an op that quantises.
    """

    inputs: Callable[[tuple[int, ...], torch.dtype], tuple[Any, ...]]
    oracle: Callable[..., tuple[Tensor, ...]]
    numbers: Callable[[tuple[Any, ...], tuple[Tensor, ...]], Numbers] | None = None


def _x(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) * 3).to(dtype)


def _row_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return (_x(shape, dtype),)


def _norm_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return _x(shape, dtype), _x(shape[-1:], dtype), EPS


def _add_norm_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return _x(shape, dtype), *_norm_inputs(shape, dtype)


def _pair_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return _x(shape, dtype), _x(shape, dtype)


def _gated_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return (_x((*shape[:-1], 2 * shape[-1]), dtype),)


def _rotary_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    *tokens, width = shape
    q, k = _x((*tokens, 3, 2 * width), dtype), _x((*tokens, 1, 2 * width), dtype)
    angles = torch.rand(*tokens, width)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype), False


def _rotate_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool, per_pair: bool, wide: bool
) -> tuple[Any, ...]:
    """Three heads before the last of ``shape``'s rows, which have angles of their own."""
    *leading, width = shape
    heads = (*leading[:-1], 3, *leading[-1:])
    tables = torch.randn(2, *leading[-1:], width if per_pair else 2 * width).to(dtype)
    x = _x((*heads, 2 * width + 3), dtype)
    return x, *tables, interleaved, per_pair, wide


def _norm_rotate_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool = False, per_pair: bool = False
) -> tuple[Any, ...]:
    x, cos, sin, *_ = _rotate_inputs(shape, dtype, interleaved, per_pair, False)
    return x, _x(x.shape[-1:], dtype), cos, sin, EPS


def _two_heads(args: tuple[Any, ...], own: int) -> tuple[Any, ...]:
    """Arguments with a second one of each of the first ``own``, in which there are fewer heads."""
    q, *rest = args
    fewer = (*q.shape[:-3], 2, *q.shape[-2:]) if q.dim() > 2 else q.shape
    k = _x(fewer, q.dtype)
    weights = [t for w in rest[: own - 1] for t in (w, _x(w.shape, w.dtype))]
    return q, k, *weights, *rest[own - 1 :]


def _qk_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    q, k, cos, sin, interleaved = _rotary_inputs(shape, dtype)
    weights = _x(q.shape[-1:], dtype), _x(k.shape[-1:], dtype)
    return q, k, *weights, cos, sin, EPS, interleaved


def _linear_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    def int8(*size: int) -> Tensor:
        return torch.randint(-128, 128, size, dtype=torch.int8)

    columns = 37
    scales = torch.rand(*shape[:-1], 1) / shape[-1], torch.rand(columns)
    bias = _x((columns,), dtype)
    return int8(*shape), scales[0], int8(columns, shape[-1]), scales[1], bias, dtype


def _few_rows_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    columns = 37
    return _x(shape, dtype), _x((columns, shape[-1]), dtype), _x((columns,), dtype)


def _weight_only_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    _, _, wq, wscale, bias, _ = _linear_inputs(shape, dtype)
    return _x(shape, dtype), wq, wscale / (100 * shape[-1]), bias


def _dynamic_linear_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    args = _weight_only_inputs(shape, dtype)
    return *args, _x((*shape[:-1], args[1].shape[0]), dtype)


def _fp8_linear_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    _, _, wq, wscale, bias, _ = _linear_inputs(shape, dtype)
    weight = torch.randn(wq.shape).to(FP8)
    return _x(shape, torch.float32).to(FP8), torch.rand(*shape[:-1], 1), weight, wscale, bias, dtype


def _norm(x: Tensor, weight: Tensor, eps: float, variant: str = "llama") -> Tensor:
    factor = weight + 1 if variant == "gemma" else weight
    return factor * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> tuple[Tensor, Tensor]:
    return _norm(x + residual, weight, eps, variant), x + residual


def _layer_norm_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return _x(shape, dtype), _x(shape[-1:], dtype), _x(shape[-1:], dtype), EPS


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed * (1 if weight is None else weight) + (0 if bias is None else bias)


def _with(inputs: Callable[..., tuple[Any, ...]], *more: Any) -> Callable[..., tuple[Any, ...]]:
    return lambda shape, dtype: (*inputs(shape, dtype), *more)


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def _gelu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _swigluoai(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    gate, value = x.unflatten(-1, (-1, 2)).unbind(-1)
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return (value + 1) * gate * torch.sigmoid(alpha * gate)


def _fatrelu(gate: Tensor, up: Tensor, threshold: float) -> Tensor:
    return torch.where(gate > threshold, gate, 0) * up


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, _: bool) -> tuple[Tensor, ...]:
    turn = torch.complex(cos, sin).unsqueeze(-2)

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((turned.real, turned.imag), -1)

    return rotate(q), rotate(k)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, per_pair: bool, wide: bool
) -> tuple[Tensor]:
    """The same by index: each element with its partner, and the sign that this one has."""
    if per_pair:
        cos, sin = (
            t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in (cos, sin)
        )
    width = cos.shape[-1]
    places = torch.arange(width)
    partner = places ^ 1 if interleaved else (places + width // 2) % width
    sign = torch.where(partner > places, -1.0, 1.0).double()
    out = x.clone()
    out[..., :width] = x[..., :width] * cos + sign * x[..., partner] * sin
    return (out,)


def _qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    variant: str = "llama",
) -> tuple[Tensor, ...]:
    q, k = _norm(q, q_weight, eps, variant), _norm(k, k_weight, eps, variant)
    return _rotary(q, k, cos, sin, interleaved)


def _norm_rotate(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    variant: str = "llama",
    interleaved: bool = False,
    per_pair: bool = False,
) -> tuple[Tensor]:
    return _rotate(_norm(x, weight, eps, variant), cos, sin, interleaved, per_pair, False)


def _linear(
    xq: Tensor, xscale: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | int, _: torch.dtype
) -> Tensor:
    return (xq.double() @ wq.double().t()) * xscale * wscale + bias


def _int8(args: tuple[Any, ...], out: tuple[Tensor, ...]) -> Numbers:
    q, scale, *rest = out
    return Numbers(q.double() * scale.double(), 0.51 * scale.double(), tuple(rest))


def _asymmetric_int8(args: tuple[Any, ...], out: tuple[Tensor, ...]) -> Numbers:
    q, scale, zero_point, *rest = out
    # where the zero point is rounded, the end of a range moves by half a step
    values = (q.double() - zero_point) * scale.double()
    return Numbers(values, 1.01 * scale.double(), tuple(rest))


def _fp8(args: tuple[Any, ...], out: tuple[Tensor, ...]) -> Numbers:
    q, scale, *rest = out
    groups = scale.shape[-1]
    wide = scale.double().repeat_interleave(q.shape[-1] // max(1, groups), -1)
    return _near_fp8(q, wide, tuple(rest))


def _near_fp8(q: Tensor, scale: Tensor, rest: tuple[Tensor, ...]) -> Numbers:
    values = q.double() * scale
    return Numbers(values, values.abs() / 15 + 2.0**-9 * scale, rest)


def _known_scale(at: int, name: str) -> Callable[..., Numbers]:
    """With the argument at that place as the scale."""

    def numbers(args: tuple[Any, ...], out: tuple[Tensor, ...]) -> Numbers:
        q, *rest = out
        scale = args[at].double()
        if name == "static_fp8":
            return _near_fp8(q, scale, tuple(rest))
        shift = args[at + 1].double() if name == "static_asymmetric_int8" else 0
        return Numbers((q.double() - shift) * scale, 0.51 * scale, tuple(rest))

    return numbers


def _cut_off(exact: Tensor, scale: Tensor, name: str) -> Tensor:
    least, largest = {"static_int8": (-128, 127), "static_fp8": (-448, 448)}[name]
    return torch.minimum(torch.maximum(exact, least * scale), largest * scale)


def _fused(source: str, name: str) -> Case:
    """A source's case with the quantisation of its first result; a known scale cuts some off."""
    base, tensors = CASES[source], len(SOURCES[source].tensors)
    both = tensors + len(QUANTISATIONS[name].settings)

    def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        args = base.inputs(shape, dtype)
        settings = {
            "static_int8": (torch.full((1,), 0.04),),
            "static_asymmetric_int8": (
                torch.full((1,), 0.04),
                torch.full((1,), 17, dtype=torch.int32),
            ),
            "static_fp8": (torch.full((1,), 0.01),),
            "group_fp8": (math.gcd(shape[-1], 128),),
        }
        return (*args[:tensors], *settings.get(name, ()), *args[tensors:])

    def oracle(*args: Any) -> tuple[Tensor, ...]:
        exact, *rest = base.oracle(*args[:tensors], *args[both:])
        if name == "static_asymmetric_int8":
            scale, shift = args[tensors:both]
            exact = _cut_off(exact + shift * scale, scale, "static_int8") - shift * scale
        elif name.startswith("static"):
            exact = _cut_off(exact, args[tensors], name)
        return exact, *rest

    if name.startswith("static"):
        return Case(inputs, oracle, _known_scale(tensors, name))
    numbers = {"dynamic_int8": _int8, "asymmetric_int8": _asymmetric_int8}
    return Case(inputs, oracle, numbers.get(name, _fp8))


def _dynamic_linear(
    x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor, residual: Tensor | None = None
) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    out = _linear((x / scale).round(), scale, wq, wscale, bias, x.dtype)
    return out if residual is None else residual + out


CASES = {
    "rms_norm": Case(_norm_inputs, lambda *a: (_norm(*a),)),
    "fused_add_rms_norm": Case(_add_norm_inputs, _add_norm),
    "silu_mul": Case(_pair_inputs, lambda *a: (_silu(*a),)),
    "gelu_mul": Case(_with(_pair_inputs, "none"), lambda *a: (_gelu(*a),)),
    "gelu_mul/tanh": Case(_with(_pair_inputs, "tanh"), lambda *a: (_gelu(*a),)),
    "silu_and_mul": Case(_gated_inputs, lambda x: (_silu(*x.chunk(2, -1)),)),
    "gelu_and_mul": Case(
        _with(_gated_inputs, "none"), lambda x, name: (_gelu(*x.chunk(2, -1), name),)
    ),
    "gelu_and_mul/tanh": Case(
        _with(_gated_inputs, "tanh"), lambda x, name: (_gelu(*x.chunk(2, -1), name),)
    ),
    "mul_and_silu": Case(_gated_inputs, lambda x: (_silu(*reversed(x.chunk(2, -1))),)),
    "fatrelu_and_mul": Case(
        _with(_gated_inputs, 0.25), lambda x, by: (_fatrelu(*x.chunk(2, -1), by),)
    ),
    "swigluoai_and_mul": Case(_gated_inputs, lambda x: (_swigluoai(x),)),
    "swigluoai_and_mul/limited": Case(_with(_gated_inputs, 1.0, 2.0), lambda *a: (_swigluoai(*a),)),
    "gelu_new": Case(_row_inputs, lambda x: (_gelu_tanh(x),)),
    "gelu_fast": Case(_row_inputs, lambda x: (_gelu_tanh(x),)),
    "quick_gelu": Case(_row_inputs, lambda x: (_quick_gelu(x),)),
    "relu2": Case(_row_inputs, lambda x: (x.clamp(min=0).square(),)),
    "layer_norm": Case(_layer_norm_inputs, lambda *a: (_layer_norm(*a),)),
    "layer_norm/plain": Case(
        lambda shape, dtype: (_x(shape, dtype), None, None, EPS), lambda *a: (_layer_norm(*a),)
    ),
    "layer_norm/without bias": Case(
        lambda shape, dtype: (_x(shape, dtype), _x(shape[-1:], dtype), None, EPS),
        lambda *a: (_layer_norm(*a),),
    ),
    "fused_add_layer_norm": Case(
        lambda shape, dtype: (_x(shape, dtype), *_layer_norm_inputs(shape, dtype)),
        lambda x, residual, *a: (_layer_norm(x + residual, *a), x + residual),
    ),
    "rotary_embedding": Case(_rotary_inputs, _rotary),
    "qk_norm_rope": Case(_qk_inputs, _qk_norm_rope),
    "rms_norm_rotate": Case(_norm_rotate_inputs, _norm_rotate),
    "linear": Case(_few_rows_inputs, lambda x, w, bias: (x @ w.t() + bias,)),
    "linear/without bias": Case(
        lambda shape, dtype: _few_rows_inputs(shape, dtype)[:2], lambda x, w: (x @ w.t(),)
    ),
    "int8_linear": Case(_linear_inputs, lambda *a: (_linear(*a),)),
    "int8_dynamic_linear": Case(_weight_only_inputs, lambda *a: (_dynamic_linear(*a),)),
    "int8_dynamic_linear/residual": Case(_dynamic_linear_inputs, lambda *a: (_dynamic_linear(*a),)),
    "weight_only_int8_linear": Case(
        _weight_only_inputs, lambda x, *a: (_linear(x, torch.ones(1), *a, x.dtype),)
    ),
    "weight_only_int8_linear/without bias": Case(
        lambda shape, dtype: (*_weight_only_inputs(shape, dtype)[:3], None),
        lambda x, wq, wscale, _: (_linear(x, torch.ones(1), wq, wscale, 0, x.dtype),),
    ),
    "fp8_linear": Case(_fp8_linear_inputs, lambda *a: (_linear(*a),)),
    "quant_int8": Case(_row_inputs, lambda x: (x,), numbers=_int8),
    "rms_norm_dynamic_int8_quant": Case(_norm_inputs, lambda *a: (_norm(*a),), numbers=_int8),
    "fused_add_rms_norm_dynamic_int8_quant": Case(_add_norm_inputs, _add_norm, numbers=_int8),
    "silu_mul_dynamic_int8_quant": Case(_pair_inputs, lambda *a: (_silu(*a),), numbers=_int8),
    "silu_and_mul_dynamic_int8_quant": Case(
        _gated_inputs, lambda x: (_silu(*x.chunk(2, -1)),), numbers=_int8
    ),
    "gelu_mul_dynamic_int8_quant": Case(
        _with(_pair_inputs, "none"), lambda *a: (_gelu(*a),), numbers=_int8
    ),
    "gelu_and_mul_dynamic_int8_quant": Case(
        _with(_gated_inputs, "tanh"),
        lambda x, name: (_gelu(*x.chunk(2, -1), name),),
        numbers=_int8,
    ),
}
CASES |= {
    "rotate" + "".join(f"/{n}" for n, on in zip(ROTATIONS, flags, strict=True) if on): Case(
        lambda shape, dtype, flags=flags: _rotate_inputs(shape, dtype, *flags), _rotate
    )
    for flags in product((False, True), repeat=3)
}
# the norms again, in each of their other variants
CASES |= {
    f"{name}/{variant}": replace(case, inputs=_with(case.inputs, variant))
    for name, case in CASES.items()
    if "rms_norm" in name or name == "qk_norm_rope"
    for variant in ("torch", "gemma")
}
# quantisation alone, and behind each source
CASES |= {
    "asymmetric_quant_int8": Case(_row_inputs, lambda x: (x,), _asymmetric_int8),
    "quant_fp8": Case(_row_inputs, lambda x: (x,), _fp8),
    "group_quant_fp8": Case(
        lambda shape, dtype: (_x(shape, dtype), math.gcd(shape[-1], 64)), lambda x, _: (x,), _fp8
    ),
    "static_quant_fp8": Case(
        _with(_row_inputs, torch.full((1,), 0.01)),
        lambda x, scale: (_cut_off(x, scale, "static_fp8"),),
        _known_scale(1, "static_fp8"),
    ),
    "static_quant_int8": Case(
        _with(_row_inputs, torch.full((1,), 0.04)),
        lambda x, scale: (_cut_off(x, scale, "static_int8"),),
        _known_scale(1, "static_int8"),
    ),
    "static_quant_int8/zero point": Case(
        _with(_row_inputs, torch.full((1,), 0.04), torch.full((1,), 17, dtype=torch.int32)),
        lambda x, scale, shift: (_cut_off(x + shift * scale, scale, "static_int8"),),
        _known_scale(1, "static_int8"),
    ),
}
CASES |= {
    f"{source}_{name}_quant": _fused(source, name)
    for source in SOURCES
    for name in QUANTISATIONS
    if f"{source}_{name}_quant" not in CASES
}
CASES |= {
    "rms_norm_rotate"
    + "".join(f"/{n}" for n, on in zip(ROTATIONS, flags, strict=False) if on): Case(
        lambda shape, dtype, flags=flags: (
            *_norm_rotate_inputs(shape, dtype, *flags),
            "gemma",
            *flags,
        ),
        _norm_rotate,
    )
    for flags in ((True, False), (False, True), (True, True))
}
# the same of queries and keys at once
CASES |= {
    "rotate_qk" + label: Case(
        lambda shape, dtype, flags=flags: _two_heads(_rotate_inputs(shape, dtype, *flags), 1),
        lambda q, k, *args: (*_rotate(q, *args), *_rotate(k, *args)),
    )
    for label, flags in {
        "": (False, False, False),
        "/wide": (False, False, True),
        "/interleaved/per_pair": (True, True, False),
    }.items()
}
CASES |= {
    "rms_norm_rotate_qk" + label: Case(
        lambda shape, dtype, flags=flags: (
            *_two_heads(_norm_rotate_inputs(shape, dtype, *flags), 2),
            "torch",
            *flags,
        ),
        lambda q, k, a, b, *args: (*_norm_rotate(q, a, *args), *_norm_rotate(k, b, *args)),
    )
    for label, flags in {"": (False, False), "/interleaved/per_pair": (True, True)}.items()
}


def op_of(case: str) -> Any:
    return getattr(torch.ops.compilepass, case.partition("/")[0]).default


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def mapped(args: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    return tuple(change(a) if isinstance(a, Tensor) else a for a in args)


def to_double(t: Tensor) -> Tensor:
    return t if t.dtype == torch.int8 else t.double()


def as_numbers(t: Tensor) -> Tensor:
    """fp8 as float32, which can be compared."""
    return t.float() if t.dtype == FP8 else t


def strided(t: Tensor) -> Tensor:
    """The same values, every second element of a wider tensor."""
    wide = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1]))
    wide[..., ::2] = t
    return wide[..., ::2]
