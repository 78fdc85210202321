"""Arguments to call each op with, for whatever checks or measures its kernels.

An op says how its arguments look for a number of rows, a width and a dtype:

    def rows(rows, width, dtype):
        return torch.randn(rows, width).to(dtype), 2.0

    register_examples("my_package::scaled_relu", rows)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import gcd
from typing import Any

import torch
from torch import Tensor

from ..errors import RegistrationError, did_you_mean
from .native.fused_quantisation import QUANTISATIONS, SOURCES
from .registry import find, kernel_ops

__all__ = ["Example", "examples_of", "register_examples"]

#: ``example(rows, width, dtype)``: the arguments of one call, on the CPU, or ``None`` where there
#: is none of that size.
Example = Callable[[int, int, torch.dtype], "tuple[Any, ...] | None"]

_examples: dict[str, dict[str, Example]] = {}


def register_examples(op: str, example: Example, *, label: str = "") -> None:
    """Say how arguments of ``op`` look; several examples have a ``label`` each.

    Tensors that stand for tokens have ``rows`` of them, and may be filled with extreme values in
    their first floating argument. Registering a label again replaces it.

    Raises:
        RegistrationError: there is no such op.
    """
    if find(op) is None:
        raise RegistrationError(
            f"Examples are given for {op}, which is not defined.",
            hint=did_you_mean(op, kernel_ops()),
        )
    _examples.setdefault(op, {})[label] = example


def examples_of(op: str) -> dict[str, Example]:
    """The examples of an op by label; empty where nobody has registered any."""
    if "compilepass::rms_norm" not in _examples:
        _register_shipped()
    return dict(_examples.get(op, {}))


EPS = 1e-6


def _x(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) * 3).to(dtype)


def _norm(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return _x(rows, width, dtype=dtype), _x(width, dtype=dtype), EPS


def _add_norm(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return _x(rows, width, dtype=dtype), *_norm(rows, width, dtype)


def _layer_norm(has_weight: bool, has_bias: bool) -> Example:
    def example(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
        weight, bias = (_x(width, dtype=dtype) if has else None for has in (has_weight, has_bias))
        return _x(rows, width, dtype=dtype), weight, bias, EPS

    return example


def _add_layer_norm(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return _x(rows, width, dtype=dtype), *_norm(rows, width, dtype)[:2], _x(width, dtype=dtype), EPS


def _two(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return _x(rows, width, dtype=dtype), _x(rows, width, dtype=dtype)


def _halves(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return (_x(rows, 2 * width, dtype=dtype),)


def _one(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return (_x(rows, width, dtype=dtype),)


def _with(example: Example, *more: Any) -> Example:
    def extended(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...] | None:
        args = example(rows, width, dtype)
        return None if args is None else (*args, *more)

    return extended


def _few_rows(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return _x(rows, width, dtype=dtype), _x(37, width, dtype=dtype)


def _few_rows_and_bias(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return *_few_rows(rows, width, dtype), _x(37, dtype=dtype)


def _linear(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    columns = 37
    xq, wq = (torch.randint(-128, 128, (n, width), dtype=torch.int8) for n in (rows, columns))
    scales = torch.rand(rows, 1) / width, torch.rand(columns)
    return xq, scales[0], wq, scales[1], _x(columns, dtype=dtype), dtype


def _weights(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    _, _, wq, scale, bias, _ = _linear(rows, width, dtype)
    # One sign for each output: what overflows is infinite then, whatever the order of a sum.
    signs = torch.tensor([1, -1]).repeat(len(wq))[: len(wq), None]
    wq = (signs * wq.long().abs()).clamp(-127, 127).to(torch.int8)
    return _x(rows, width, dtype=dtype), wq, scale / (100 * width), bias


def _weights_and_residual(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    args = _weights(rows, width, dtype)
    return *args, _x(rows, args[1].shape[0], dtype=dtype)


def _fp8_linear(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    xq, xscale, wq, wscale, bias, _ = _linear(rows, width, dtype)
    x, w = ((t.float() / 16).to(torch.float8_e4m3fn) for t in (xq, wq))
    return x, xscale, w, wscale, bias, dtype


def _group(width: int) -> int:
    """As wide as divides 128, or the whole row: one small value has no scale to speak of."""
    widest = gcd(width, 128)
    return widest if widest > 1 else width


def _quantised(example: Example, tensors: int, settings: tuple[str, ...]) -> Example:
    """With what a quantisation is told, after the tensors that it gets its rows from."""

    def extended(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...] | None:
        args = example(rows, width, dtype)
        told = {
            "Tensor scale": torch.full((1,), 0.04),
            "Tensor zero_point": torch.full((1,), 17, dtype=torch.int32),
            "int group": _group(width),
        }
        return (
            None if args is None else (*args[:tensors], *map(told.get, settings), *args[tensors:])
        )

    return extended


def _rotary(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    angles = torch.rand(rows, width)
    q, k = (_x(rows, heads, 2 * width, dtype=dtype) for heads in (3, 1))
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def _qk(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    q, k, cos, sin = _rotary(rows, width, dtype)
    weights = (_x(2 * width, dtype=dtype) for _ in range(2))
    return q, k, *weights, cos, sin, EPS


def _rotation(per_pair: bool) -> Example:
    def example(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
        cos, sin = _x(2, rows, width if per_pair else 2 * width, dtype=dtype)
        return _x(2, 3, rows, 2 * width + 3, dtype=dtype), cos, sin

    return example


def _qk_rotation(per_pair: bool) -> Example:
    def example(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...] | None:
        rotation = _rotation(per_pair)(rows, width, dtype)
        if rotation is None:
            return None
        q, cos, sin = rotation
        return q, _x(2, 1, rows, q.shape[-1], dtype=dtype), cos, sin

    return example


def _qk_norm_rotation(per_pair: bool) -> Example:
    def example(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...] | None:
        rotation = _qk_rotation(per_pair)(rows, width, dtype)
        if rotation is None:
            return None
        q, k, cos, sin = rotation
        return q, k, *_x(2, q.shape[-1], dtype=dtype), cos, sin, EPS

    return example


def _norm_rotation(per_pair: bool) -> Example:
    def example(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...] | None:
        rotation = _rotation(per_pair)(rows, width, dtype)
        if rotation is None:
            return None
        x, cos, sin = rotation
        return x, _x(x.shape[-1], dtype=dtype), cos, sin, EPS

    return example


def _register_shipped() -> None:
    norms: dict[str, Example] = {"rms_norm": _norm, "fused_add_rms_norm": _add_norm}
    for name, example in norms.items():
        for variant in ("llama", "torch", "gemma"):
            _shipped(name, _with(example, variant), variant)
    for approximate in ("none", "tanh"):
        _shipped("gelu_mul", _with(_two, approximate), approximate)
        _shipped("gelu_and_mul", _with(_halves, approximate), approximate)
    _shipped("silu_mul", _two)
    for op in ("silu_and_mul", "mul_and_silu"):
        _shipped(op, _halves)
    scale, zero_point = torch.full((1,), 0.04), torch.full((1,), 17, dtype=torch.int32)
    _shipped("static_quant_int8", _with(_one, scale), "symmetric")
    _shipped("static_quant_int8", _with(_one, scale, zero_point), "zero point")
    _shipped("static_quant_fp8", _with(_one, scale))
    _shipped("group_quant_fp8", _quantised(_one, 1, ("int group",)))
    for op in ("quant_fp8", "asymmetric_quant_int8"):
        _shipped(op, _one)
    _shipped("fatrelu_and_mul", _with(_halves, 0.25))
    _shipped("swigluoai_and_mul", _halves)
    _shipped("swigluoai_and_mul", _with(_halves, 1.0, 2.0), "alpha=1, limit=2")
    for op in ("quant_int8", "gelu_new", "gelu_fast", "quick_gelu", "relu2"):
        _shipped(op, _one)
    for label, has_weight, has_bias in (("", 1, 1), ("no bias", 1, 0), ("plain", 0, 0)):
        _shipped("layer_norm", _layer_norm(bool(has_weight), bool(has_bias)), label)
    _shipped("fused_add_layer_norm", _add_layer_norm)
    _shipped("linear", _few_rows, "no bias")
    _shipped("linear", _few_rows_and_bias, "bias")
    for source, made in SOURCES.items():
        for label, example in examples_of(f"compilepass::{source}").items():
            for name, quantisation in QUANTISATIONS.items():
                quantised = _quantised(example, len(made.tensors), quantisation.settings)
                _shipped(f"{source}_{name}_quant", quantised, label)
    _shipped("int8_linear", _linear)
    _shipped("int8_dynamic_linear", _weights, "no residual")
    _shipped("int8_dynamic_linear", _weights_and_residual, "residual")
    _shipped("weight_only_int8_linear", _weights)
    _shipped("fp8_linear", _fp8_linear)
    for interleaved in (False, True):
        label = "interleaved" if interleaved else "halves"
        _shipped("rotary_embedding", _with(_rotary, interleaved), label)
        for variant in ("llama", "torch", "gemma"):
            example = _with(_qk, interleaved, variant)
            _shipped("qk_norm_rope", example, f"{label}, {variant}")
            for per_pair in (False, True):
                example = _with(_norm_rotation(per_pair), variant, interleaved, per_pair)
                flags = [label, *["per pair"] * per_pair, variant]
                _shipped("rms_norm_rotate", example, ", ".join(flags))
                example = _with(_qk_norm_rotation(per_pair), variant, interleaved, per_pair)
                _shipped("rms_norm_rotate_qk", example, ", ".join(flags))
        for per_pair, wide in product((False, True), repeat=2):
            flags = [label, *["per pair"] * per_pair, *["wide"] * wide]
            example = _with(_rotation(per_pair), interleaved, per_pair, wide)
            _shipped("rotate", example, ", ".join(flags))
            example = _with(_qk_rotation(per_pair), interleaved, per_pair, wide)
            _shipped("rotate_qk", example, ", ".join(flags))


def _shipped(op: str, example: Example, label: str = "") -> None:
    _examples.setdefault(f"compilepass::{op}", {}).setdefault(label, example)
