"""Quantisation of activations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OpValueError
from ..kernels import native
from ..ops import CustomOp

__all__ = ["AsymmetricQuantInt8", "QuantFp8", "QuantInt8", "StaticQuantFp8", "StaticQuantInt8"]


@CustomOp.register("quant_int8", dynamic_arg_dims={"x": 0})
class QuantInt8(CustomOp):
    """Symmetric dynamic int8 quantisation with one scale a row: ``x ≈ q * scale``.

    ``x``: ``[..., H]``; returns ``q`` int8 ``[..., H]`` and ``scale`` fp32 ``[..., 1]``, the row's
    largest magnitude over 127.

    Raises ``OpValueError`` for a scalar and for rows of no elements, which have no largest one.
    """

    def forward_native(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _check_rows(self, x)
        return native.quant_int8(x)

    def forward_cpu(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _check_rows(self, x)
        quantised: tuple[Tensor, Tensor] = torch.ops.compilepass.quant_int8(x)
        return quantised

    forward_cuda = forward_cpu


@CustomOp.register("asymmetric_quant_int8", dynamic_arg_dims={"x": 0})
class AsymmetricQuantInt8(CustomOp):
    """Dynamic int8 quantisation of a row's range: ``x ≈ (q - zero_point) * scale``.

    ``x``: ``[..., H]``; returns ``q`` int8 ``[..., H]``, ``scale`` fp32 ``[..., 1]`` and
    ``zero_point`` int32 ``[..., 1]``. The range holds zero, which is exact.

    Raises ``OpValueError`` as :class:`QuantInt8` does.
    """

    def forward_native(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _check_rows(self, x)
        return native.asymmetric_quant_int8(x)

    def forward_cpu(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _check_rows(self, x)
        quantised: tuple[Tensor, Tensor, Tensor] = torch.ops.compilepass.asymmetric_quant_int8(x)
        return quantised

    forward_cuda = forward_cpu


@CustomOp.register("quant_fp8", dynamic_arg_dims={"x": 0})
class QuantFp8(CustomOp):
    """Dynamic fp8 (``float8_e4m3fn``) quantisation, a scale a row or a ``group`` of neighbours.

    ``x``: ``[..., H]``; returns ``q`` fp8 ``[..., H]`` and ``scale`` fp32, ``[..., 1]`` or
    ``[..., H / group]``: the largest magnitude over 448.

    Raises ``OpValueError`` as :class:`QuantInt8` does, for a group below 1, and for rows that are
    not whole groups.
    """

    def __init__(self, group: int | None = None, **op_options: bool) -> None:
        if group is not None and group < 1:
            raise OpValueError(
                f"QuantFp8 got group={group}",
                why="A scale is of that many neighbours.",
                hint="Give 64 or 128, or None for a scale a row.",
            )
        super().__init__(**op_options)
        self.group = group

    def forward_native(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _check_rows(self, x, self.group)
        return native.quant_fp8(x) if self.group is None else native.group_quant_fp8(x, self.group)

    def forward_cpu(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _check_rows(self, x, self.group)
        ops, group = torch.ops.compilepass, self.group
        quantised: tuple[Tensor, Tensor] = (
            ops.quant_fp8(x) if group is None else ops.group_quant_fp8(x, group)
        )
        return quantised

    forward_cuda = forward_cpu

    def extra_repr(self) -> str:
        return f"group={self.group}"


class _StaticQuant(CustomOp):
    """Holds a scale as state, since it is found once, by calibration."""

    scale: Tensor

    def __init__(self, scale: float = 1.0, **op_options: bool) -> None:
        if not 0 < scale < float("inf"):
            raise OpValueError(
                f"{type(self).__name__} got scale={scale}",
                why="Values are divided by the scale.",
                hint="Give the largest magnitude expected over that of the quantised type.",
            )
        super().__init__(**op_options)
        self.register_buffer("scale", torch.tensor([scale], dtype=torch.float32))

    def extra_repr(self) -> str:
        return f"scale={self.scale.item():.6g}"


@CustomOp.register("static_quant_int8", dynamic_arg_dims={"x": 0})
class StaticQuantInt8(_StaticQuant):
    """int8 quantisation with a known scale, and maybe zero point: ``x ≈ (q - zero_point) * scale``.

    ``x``: ``[..., H]``; returns ``q`` int8 ``[..., H]``; what lies beyond int8 is cut off. The
    buffers ``scale`` (fp32) and ``zero_point`` (int32, or ``None``) have one element.

    Raises ``OpValueError`` for a scale that is not positive and finite, for a zero point that is
    not an int8, and for inputs as :class:`QuantInt8` does.
    """

    zero_point: Tensor | None

    def __init__(
        self, scale: float = 1.0, zero_point: int | None = None, **op_options: bool
    ) -> None:
        super().__init__(scale, **op_options)
        if zero_point is not None and not -128 <= zero_point <= 127:
            raise OpValueError(
                f"StaticQuantInt8 got zero_point={zero_point}",
                why="It is what stands for zero.",
                hint="Give an int8, from -128 to 127.",
            )
        shift = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int32)
        self.register_buffer("zero_point", shift)

    def forward_native(self, x: Tensor) -> Tensor:
        _check_rows(self, x)
        return native.static_quant_int8(x, self.scale.float(), self.zero_point)

    def forward_cpu(self, x: Tensor) -> Tensor:
        _check_rows(self, x)
        quantised: Tensor = torch.ops.compilepass.static_quant_int8(
            x, self.scale.float(), self.zero_point
        )
        return quantised

    forward_cuda = forward_cpu


@CustomOp.register("static_quant_fp8", dynamic_arg_dims={"x": 0})
class StaticQuantFp8(_StaticQuant):
    """fp8 (``float8_e4m3fn``) quantisation with a known scale: ``x ≈ q * scale``.

    ``x``: ``[..., H]``; returns ``q`` fp8 ``[..., H]``; magnitudes above 448 are cut off. The
    buffer ``scale`` (fp32) has one element.

    Raises ``OpValueError`` for a scale that is not positive and finite, and for inputs as
    :class:`QuantInt8` does.
    """

    def forward_native(self, x: Tensor) -> Tensor:
        _check_rows(self, x)
        return native.static_quant_fp8(x, self.scale.float())

    def forward_cpu(self, x: Tensor) -> Tensor:
        _check_rows(self, x)
        quantised: Tensor = torch.ops.compilepass.static_quant_fp8(x, self.scale.float())
        return quantised

    forward_cuda = forward_cpu


def _check_rows(op: CustomOp, x: Tensor, group: int | None = None) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise OpValueError(
            f"{type(op).__name__} got x of the shape {tuple(x.shape)}",
            why="The scale of a row is taken from its largest element.",
            hint="Give x of the shape [..., H] with H > 0.",
        )
    if group is not None and x.shape[-1] % group:
        raise OpValueError(
            f"{type(op).__name__}(group={group}) got x of the shape {tuple(x.shape)}",
            why="A row is whole groups, of one scale each.",
            hint=f"Give x of a width that {group} divides, or another group.",
        )
