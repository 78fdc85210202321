"""Linear layers with quantised weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import OpValueError
from ..kernels import native
from ..ops import CustomOp
from .quant import QuantInt8

__all__ = ["Int8Linear"]


@CustomOp.register("int8_linear", dynamic_arg_dims={"x": 0})
class Int8Linear(CustomOp):
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
        self.quant = QuantInt8(**op_options)
        weight = torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
        self.register_buffer("weight", weight)
        scale = torch.ones(out_features, dtype=torch.float32, device=device)
        self.register_buffer("weight_scale", scale)
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **op_options: bool) -> Int8Linear:
        """The int8 layer nearest to ``linear``: each output channel is quantised on its own.

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
        quantised, scale = native.quant_int8(weight)
        layer.weight.copy_(quantised)
        layer.weight_scale.copy_(scale.squeeze(-1))
        if layer.bias is not None:
            layer.bias.data.copy_(bias)
        return layer

    def forward_native(self, x: Tensor) -> Tensor:
        return native.int8_linear(*self._operands(x))

    def forward_cpu(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.compilepass.int8_linear(*self._operands(x))
        return out

    forward_cuda = forward_cpu

    def _operands(
        self, x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype]:
        """What both forwards multiply: the input is quantised here, by an op of its own."""
        out_features, in_features = self.weight.shape
        if x.shape[-1:] != (in_features,):
            raise OpValueError(
                f"Int8Linear({in_features}, {out_features}) got x of the shape {tuple(x.shape)}",
                why="It multiplies the last dim of x with its weight.",
                hint=f"Give x of the shape [..., {in_features}].",
            )
        q, scale = self.quant(x)
        # .float(): model.bfloat16() casts every floating buffer, and the kernels take fp32 scales.
        return q, scale, self.weight, self.weight_scale.float(), self.bias, x.dtype

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"{in_features}, {out_features}, bias={self.bias is not None}"
