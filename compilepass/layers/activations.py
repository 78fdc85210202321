"""Gated activations: an activation of the first half of the last dim, times the second half."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OpValueError, did_you_mean
from ..kernels import native
from ..ops import CustomOp

__all__ = ["GeluAndMul", "SiluAndMul"]

_APPROXIMATIONS = ("none", "tanh")


@CustomOp.register("silu_and_mul", dynamic_arg_dims={"x": 0})
class SiluAndMul(CustomOp):
    """SwiGLU's gate (arXiv:2002.05202): ``silu(x[..., :I]) * x[..., I:]``.

    ``x``: ``[..., 2 * I]``, result: ``[..., I]`` of the same dtype.

    Raises ``OpValueError`` for an odd width.
    """

    def forward_native(self, x: Tensor) -> Tensor:
        _check_halves(self, x)
        return native.silu_and_mul(x)

    def forward_cpu(self, x: Tensor) -> Tensor:
        _check_halves(self, x)
        gated: Tensor = torch.ops.compilepass.silu_and_mul(x)
        return gated

    forward_cuda = forward_cpu


@CustomOp.register("gelu_and_mul", dynamic_arg_dims={"x": 0})
class GeluAndMul(CustomOp):
    """GeGLU's gate (arXiv:2002.05202): ``gelu(x[..., :I]) * x[..., I:]``.

    ``x``: ``[..., 2 * I]``, result: ``[..., I]`` of the same dtype. ``approximate`` is ``"none"``
    or ``"tanh"``, as in ``torch.nn.functional.gelu``.

    Raises ``OpValueError`` for an odd width or another ``approximate``.
    """

    def __init__(self, approximate: str = "none", **op_options: bool) -> None:
        if approximate not in _APPROXIMATIONS:
            raise OpValueError(
                f"GeluAndMul got approximate={approximate!r}",
                why="There are the exact GELU, 'none', and its 'tanh' approximation.",
                hint=did_you_mean(str(approximate), _APPROXIMATIONS),
            )
        super().__init__(**op_options)
        self.approximate = approximate

    def forward_native(self, x: Tensor) -> Tensor:
        _check_halves(self, x)
        return native.gelu_and_mul(x, self.approximate)

    def forward_cpu(self, x: Tensor) -> Tensor:
        _check_halves(self, x)
        gated: Tensor = torch.ops.compilepass.gelu_and_mul(x, self.approximate)
        return gated

    forward_cuda = forward_cpu

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


def _check_halves(op: CustomOp, x: Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise OpValueError(
            f"{type(op).__name__} got x of the shape {tuple(x.shape)}",
            why="The last dim holds the gate and the value, which are equally wide.",
            hint="Give x of the shape [..., 2 * I].",
        )
