"""Linear layers with quantised weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..errors import OpValueError
from ..kernels import native
from ..ops import CustomOp
from .quant import QuantFp8, QuantInt8

__all__ = ["Fp8Linear", "Int8Linear", "WeightOnlyInt8Linear"]

Layer = TypeVar("Layer", bound="_QuantisedLinear")


class _QuantisedLinear(CustomOp):
    """``weight`` ``[out_features, in_features]`` in a byte each, and a scale for each output.

    Both are buffers: the layer is for inference. A new one has zero weights, to be filled by
    ``load_state_dict``; ``from_linear`` quantises a trained layer. ``dtype`` is the bias's.
    """

    weight_dtype: ClassVar[torch.dtype] = torch.int8
    input_op: ClassVar[type[QuantInt8] | type[QuantFp8] | None] = None

    weight: Tensor
    weight_scale: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **op_options: bool,
    ) -> None:
        super().__init__(**op_options)
        if self.input_op is not None:
            self.quant = self.input_op(**op_options)
        weight = torch.zeros(out_features, in_features, dtype=self.weight_dtype, device=device)
        self.register_buffer("weight", weight)
        scale = torch.ones(out_features, dtype=torch.float32, device=device)
        self.register_buffer("weight_scale", scale)
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros)

    @classmethod
    def from_linear(cls: type[Layer], linear: nn.Linear, **op_options: bool) -> Layer:
        """The layer nearest to ``linear``: each output channel is quantised on its own.

        The bias is copied, in its dtype; the result is on the device of ``linear``.
        """
        weight, bias = linear.weight.detach(), linear.bias
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=bias is not None,
            dtype=weight.dtype,
            device=weight.device,
            **op_options,
        )
        quantise = native.quant_fp8 if cls.weight_dtype == native.FP8 else native.quant_int8
        quantised, scale = quantise(weight)
        layer.weight.copy_(quantised)
        layer.weight_scale.copy_(scale.squeeze(-1))
        if layer.bias is not None:
            layer.bias.data.copy_(bias)
        return layer.train(linear.training)

    def _scales(self) -> Tensor:
        # .float(): model.bfloat16() casts them too, and the kernels take fp32 scales
        return self.weight_scale.float()

    def _check(self, x: Tensor) -> None:
        out_features, in_features = self.weight.shape
        if x.shape[-1:] != (in_features,):
            raise OpValueError(
                f"{type(self).__name__}({in_features}, {out_features}) got x of the shape "
                f"{tuple(x.shape)}",
                why="It multiplies the last dim of x with its weight.",
                hint=f"Give x of the shape [..., {in_features}].",
            )

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"{in_features}, {out_features}, bias={self.bias is not None}"


Operands = tuple[Tensor, Tensor, Tensor, Tensor, "Tensor | None", torch.dtype]


@CustomOp.register("int8_linear", dynamic_arg_dims={"x": 0})
class Int8Linear(_QuantisedLinear):
    """``x @ weight.T + bias`` in int8: a scale for each output channel, and one for each row of x.

    ``x``: ``[..., in_features]`` in floating point; result: ``[..., out_features]`` of the dtype of
    ``x``, accumulated exactly and scaled in fp32. The input is quantised by ``self.quant``, an op
    with a policy word of its own, so that passes can fuse it with what made ``x``. Projections of
    one input should be one layer, whose output is split: then the input is quantised once.

    ``weight`` (int8 ``[out_features, in_features]``) and ``weight_scale`` (fp32
    ``[out_features]``) are buffers: the layer is for inference. A new one has zero weights, to
    be filled by ``load_state_dict``; ``from_linear`` quantises a trained layer. ``dtype`` is the
    bias's.

    Raises ``OpValueError`` for an input of another width.
    """

    input_op = QuantInt8

    def forward_native(self, x: Tensor) -> Tensor:
        return native.int8_linear(*self._operands(x))

    def forward_cpu(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.compilepass.int8_linear(*self._operands(x))
        return out

    forward_cuda = forward_cpu

    def _operands(self, x: Tensor) -> Operands:
        """What both forwards multiply: the input is quantised here, by an op of its own."""
        self._check(x)
        q, scale = self.quant(x)
        return q, scale, self.weight, self._scales(), self.bias, x.dtype


@CustomOp.register("fp8_linear", dynamic_arg_dims={"x": 0})
class Fp8Linear(_QuantisedLinear):
    """``x @ weight.T + bias`` in fp8 (``float8_e4m3fn``): as :class:`Int8Linear`, summed in fp32.

    The input is quantised by ``self.quant``, a :class:`QuantFp8`; ``weight`` stays fp8 where the
    model is cast to another dtype.

    Raises ``OpValueError`` for an input of another width.
    """

    weight_dtype = native.FP8
    input_op = QuantFp8

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # model.bfloat16() casts every floating buffer; a wider type holds fp8 exactly
        self.weight = self.weight.to(native.FP8)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # as bytes: pickle (torch 2.13) writes a tensor of fp8 that it cannot read
        state = super().__getstate__()
        state["_buffers"] = {**self._buffers, "weight": self.weight.view(torch.uint8)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["_buffers"]["weight"] = state["_buffers"]["weight"].view(native.FP8)
        super().__setstate__(state)

    def forward_native(self, x: Tensor) -> Tensor:
        return native.fp8_linear(*self._operands(x))

    def forward_cpu(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.compilepass.fp8_linear(*self._operands(x))
        return out

    forward_cuda = forward_cpu

    def _operands(self, x: Tensor) -> Operands:
        self._check(x)
        q, scale = self.quant(x)
        return q, scale, self.weight, self._scales(), self.bias, x.dtype


@CustomOp.register("weight_only_int8_linear", dynamic_arg_dims={"x": 0})
class WeightOnlyInt8Linear(_QuantisedLinear):
    """``x @ weight.T + bias`` with an int8 weight and ``x`` as it is, summed in fp32.

    ``x``: ``[..., in_features]`` in floating point; result: ``[..., out_features]`` of the dtype of
    ``x``. Nearer to the layer it was made from than :class:`Int8Linear`, and slower where rows are
    many. State and construction are those of :class:`Int8Linear`.

    Raises ``OpValueError`` for an input of another width.
    """

    def forward_native(self, x: Tensor) -> Tensor:
        self._check(x)
        return native.weight_only_int8_linear(x, self.weight, self._scales(), self.bias)

    def forward_cpu(self, x: Tensor) -> Tensor:
        self._check(x)
        out: Tensor = torch.ops.compilepass.weight_only_int8_linear(
            x, self.weight, self._scales(), self.bias
        )
        return out

    forward_cuda = forward_cpu
