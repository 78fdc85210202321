"""Where a program's row goes, on Triton: rounded to its dtype, or quantised in any of the ways.

A source computes a row into registers and hands it to :func:`store_row`, so each source has one
kernel, compiled for each :class:`Sink` that it is used with. Rows that do not fit into registers
are written as they are, and quantised by :func:`quantise_rows` from there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from ..native.fused_quantisation import QUANTISATIONS, SOURCES
from ..registry import find
from . import rows
from .rows import block_of, by_rows, largest_bits, outputs, spaced, tuned

__all__ = ["Sink", "quantise_rows", "quantised_ops", "sink_for", "store_row"]

FP8 = torch.float8_e4m3fn


@triton.jit
def _scale_of(bits, steps: tl.constexpr):
    """The scale of a row, or of each group, from the largest of its :func:`largest_bits`."""
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < 1e-5, 1e-5, largest)
    return tl.div_rn(largest, tl.zeros_like(largest) + steps)


@triton.jit
def _rounded_even(value):
    """To the nearest integer, half to even, for magnitudes up to 2**21."""
    return value + 12582912.0 - 12582912.0


@triton.jit
def _int8(value, scale, zero_point):
    quotient = tl.div_rn(value, scale + tl.zeros_like(value))
    # what is far out of range stays there, and within what can be rounded so
    steps = _rounded_even(tl.clamp(quotient, -2097152.0, 2097152.0)) + zero_point
    return tl.clamp(steps, -128.0, 127.0).to(tl.int8)


@triton.jit
def _fp8(value, scale):
    """The bits of float8_e4m3fn, to nearest, ties to even.

    Below 2**-6 its steps are 2**-9, the last digit of numbers around 2**14; above, it is a float32
    with a shorter fraction and another bias.
    """
    quotient = tl.div_rn(value, scale + tl.zeros_like(value))
    nothing = quotient != quotient
    quotient = tl.clamp(quotient, -448.0, 448.0)
    bits = quotient.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    large = (magnitude + ((magnitude >> 20) & 1) + (0x7FFFF - 0x3C000000)) >> 20
    number = tl.where(magnitude < 0x3C800000, small, large) | ((bits >> 24) & 0x80)
    return tl.where(nothing, 0x7F, number).to(tl.uint8)


# Conditions name one sink each: of an `or`, Triton would compile both branches.


@triton.jit
def _encoded(value, scale, zero_point, SINK: tl.constexpr):
    if SINK == "dynamic_fp8" or SINK == "static_fp8":
        bits = _fp8(value, scale)
    else:
        bits = _int8(value, scale, zero_point)
    return bits


@triton.jit
def _settings(value, row, scales, zero_points, scale, zero_point, SINK: tl.constexpr):
    """The scale and zero point of a row, stored where they are found, loaded where they are known.

    ``value`` may also be, for each lane, the element of a longer row with the largest magnitude;
    an asymmetric quantisation needs two of them.
    """
    shift = 0.0
    if SINK == "dynamic_int8":
        found = _scale_of(tl.max(largest_bits(value), 0), 127.0)
        tl.store(scales + row, found)
    elif SINK == "dynamic_fp8":
        found = _scale_of(tl.max(largest_bits(value), 0), 448.0)
        tl.store(scales + row, found)
    elif SINK == "asymmetric_int8":
        least = tl.minimum(tl.min(value, 0), 0.0)
        extent = tl.maximum(tl.max(value, 0), 0.0) - least
        # minima and maxima ignore a NaN
        is_nan = tl.max(largest_bits(value), 0) > 0x7F800000
        extent = tl.where(is_nan, float("nan"), tl.where(extent < 1e-5, 1e-5, extent))
        found = tl.div_rn(extent, tl.zeros_like(extent) + 255.0)
        shift = -128.0 - _rounded_even(tl.div_rn(least, found))
        tl.store(scales + row, found)
        tl.store(zero_points + row, shift.to(tl.int32))
    elif SINK == "static_asymmetric_int8":
        found = tl.load(scale)
        shift = tl.load(zero_point).to(tl.float32)
    else:
        found = tl.load(scale)
    return found, shift


@triton.jit
def store_row(
    value,
    row,
    offsets,
    mask,
    out,
    scales,
    zero_points,
    scale,
    zero_point,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store a row that is held whole, and what its quantisation finds; ``out`` is where it starts.

    Elements behind the row are 0.
    """
    if SINK == "as it is":
        tl.store(out + offsets, value.to(out.dtype.element_ty), mask)
    elif SINK == "group_fp8":
        value = tl.reshape(value, (BLOCK // GROUP, GROUP))
        found = _scale_of(tl.max(largest_bits(value), 1), 448.0)
        groups = tl.arange(0, BLOCK // GROUP)
        tl.store(scales + row * (WIDTH // GROUP) + groups, found, groups < WIDTH // GROUP)
        tl.store(out + offsets, tl.reshape(_fp8(value, found[:, None]), (BLOCK,)), mask)
    else:
        found, shift = _settings(value, row, scales, zero_points, scale, zero_point, SINK)
        tl.store(out + offsets, _encoded(value, found, shift, SINK), mask)


@dataclass(frozen=True)
class Sink:
    """A quantisation with where its results go and what it is given; by default, none."""

    out: Tensor
    kind: str = "as it is"
    scales: Tensor | None = None
    zero_points: Tensor | None = None
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    group: int = 1

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """As a kernel takes them: an argument that there is stands for those that there are not."""
        others = (self.scales, self.zero_points, self.scale, self.zero_point)
        return self.out, *(self.out if t is None else t for t in others)

    @property
    def constants(self) -> dict[str, Any]:
        return {"SINK": self.kind, "GROUP": self.group}

    @property
    def results(self) -> tuple[Tensor, ...]:
        out = self.out.view(FP8) if self.kind.endswith("fp8") else self.out
        return tuple(t for t in (out, self.scales, self.zero_points) if t is not None)


def sink_for(kind: str, new: tuple[Tensor, ...], settings: tuple[Any, ...]) -> Sink:
    """Of new results, as the fake makes them, and of the quantisation's settings."""
    out, *found = new
    scales, zero_points = [*found, None, None][:2]
    if out.dtype == FP8:  # Triton has it for some GPUs only
        out = torch.empty_like(out, dtype=torch.uint8)
    if kind == "group_fp8":
        return Sink(out, kind, scales, group=settings[0])
    scale, zero_point = [*settings, None, None][:2]
    return Sink(out, kind, scales, zero_points, scale, zero_point)


@triton.jit
def _quantise_rows(
    x,
    out,
    scales,
    zero_points,
    scale,
    zero_point,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    GROUP: tl.constexpr,
    FINDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * WIDTH
    offsets = tl.arange(0, BLOCK)
    if WIDTH <= BLOCK:
        mask = offsets < WIDTH
        value = tl.load(x + offsets, mask, 0.0).to(tl.float32)
        store_row(
            value, row, offsets, mask, out, scales, zero_points, scale, zero_point,
            WIDTH, BLOCK, SINK, GROUP,
        )  # fmt: skip
    elif SINK == "group_fp8":
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = tl.load(x + at, at < WIDTH, 0.0).to(tl.float32)
            value = tl.reshape(value, (BLOCK // GROUP, GROUP))
            found = _scale_of(tl.max(largest_bits(value), 1), 448.0)
            groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
            places = scales + row * (WIDTH // GROUP) + groups
            tl.store(places, found, groups < WIDTH // GROUP)
            tl.store(out + at, tl.reshape(_fp8(value, found[:, None]), (BLOCK,)), at < WIDTH)
    else:
        least = tl.zeros((BLOCK,), tl.float32)
        most = tl.zeros((BLOCK,), tl.float32)
        if FINDS:
            for start in range(0, WIDTH, BLOCK):
                at = start + offsets
                value = tl.load(x + at, at < WIDTH, 0.0).to(tl.float32)
                # a NaN stays, as none of the two comparisons holds and it is not equal to itself
                least = tl.where((value < least) | (value != value), value, least)
                most = tl.where((value > most) | (value != value), value, most)
        extremes = tl.reshape(tl.join(least, most), (2 * BLOCK,))
        found, shift = _settings(extremes, row, scales, zero_points, scale, zero_point, SINK)
        for start in range(0, WIDTH, BLOCK):
            at = start + offsets
            value = tl.load(x + at, at < WIDTH, 0.0).to(tl.float32)
            tl.store(out + at, _encoded(value, found, shift, SINK), at < WIDTH)


_QUANTISE_ROWS = tuned(_quantise_rows, ["WIDTH", "SINK", "GROUP"])


def quantise_rows(x: Tensor, sink: Sink) -> None:
    """Quantise rows that are there already, of any width."""
    width = x.shape[-1]
    values = spaced(x)
    block = max(block_of(width), sink.group)
    by_rows(_QUANTISE_ROWS, block, x.numel() // width)(
        values.tensor,
        *sink.pointers,
        values.stride,
        WIDTH=width,
        BLOCK=block,
        FINDS=sink.scale is None,
        **sink.constants,
    )


#: writes a source's rows, given a sink and the source's arguments; returns its other results
Write = Callable[..., tuple[Tensor, ...]]


def quantised_ops(source_name: str, write: Write) -> dict[str, Any]:
    """The ops ``compilepass_triton::<source>_<quantisation>_quant``, by the name in it."""
    source = SOURCES[source_name]
    tensors = len(source.tensors)

    def made(kind: str) -> Any:
        name = f"{source_name}_{kind}_quant"
        both = tensors + len(QUANTISATIONS[kind].settings)
        results = QUANTISATIONS[kind].results

        def quantised(*args: Any) -> Any:
            own, settings = (*args[:tensors], *args[both:]), args[tensors:both]
            new = outputs(name, *args)
            new = new if isinstance(new, tuple) else (new,)
            sink = sink_for(kind, new[:results], settings)
            if sink.out.shape[-1] <= rows.WIDEST_BLOCK:
                rest = write(sink, new[results:], *own)
            else:
                whole = outputs(source_name, *own)
                first, *_ = whole if isinstance(whole, tuple) else (whole,)
                rest = write(Sink(first), new[results:], *own)
                quantise_rows(first, sink)
            returned = (*sink.results, *rest)
            return returned if len(returned) > 1 else returned[0]

        quantised.__signature__ = _signature(name)  # type: ignore[attr-defined]
        return triton_op(f"compilepass_triton::{name}", quantised, mutates_args=())

    return {f"{source_name}_{kind}_quant": made(kind) for kind in QUANTISATIONS}


_TYPES = {
    "Tensor": Tensor,
    "Optional[Tensor]": Tensor | None,
    "float": float,
    "int": int,
    "str": str,
}


def _signature(name: str) -> inspect.Signature:
    """The signature of ``compilepass::name``, from which PyTorch infers that of the kernel's op."""
    known = find(f"compilepass::{name}")
    assert known is not None
    schema = known.overload._schema
    parameters = [
        inspect.Parameter(
            a.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
            annotation=_TYPES[str(a.type)],
        )
        for a in schema.arguments
    ]
    results: Any = tuple[(Tensor,) * len(schema.returns)]  # type: ignore[misc]
    returned = Tensor if len(schema.returns) == 1 else results
    return inspect.Signature(parameters, return_annotation=returned)
