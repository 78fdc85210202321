"""Normalisation over the last dim, with the residual addition that comes before it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from ..errors import OpValueError
from ..kernels import native
from ..ops import CustomOp

__all__ = ["GemmaRMSNorm", "LayerNorm", "RMSNorm"]

_TOKENS = {"x": {0: "tokens"}, "residual": {0: "tokens"}}


class _RootMeanSquareNorm(CustomOp):
    """What the RMS norms share; ``variant`` tells the kernels which it is."""

    variant: ClassVar[str]
    weight: nn.Parameter
    eps: float

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        _check(self, self.weight.shape[0], x, residual)
        if residual is None:
            return native.rms_norm(x, self.weight, self.eps, self.variant)
        return native.fused_add_rms_norm(x, residual, self.weight, self.eps, self.variant)

    def forward_cpu(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        _check(self, self.weight.shape[0], x, residual)
        ops = torch.ops.compilepass
        result: Tensor | tuple[Tensor, Tensor] = (
            ops.rms_norm(x, self.weight, self.eps, self.variant)
            if residual is None
            else ops.fused_add_rms_norm(x, residual, self.weight, self.eps, self.variant)
        )
        return result

    forward_cuda = forward_cpu

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@CustomOp.register("rms_norm", dynamic_arg_dims=_TOKENS)
class RMSNorm(_RootMeanSquareNorm):
    """Root-mean-square norm (arXiv:1910.07467), optionally of ``x + residual``.

    ``norm(x)`` returns the normed ``x``; ``norm(x, residual)`` returns ``(normed, x + residual)``.
    ``x`` and ``residual``: ``[..., hidden_size]``, of one shape. Computed in fp32 and rounded to
    the dtype of ``x`` before the weight is applied, as in Llama.

    Raises ``OpValueError`` for an input of another width, and for a residual of another shape.
    """

    variant = "llama"

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **op_options: bool,
    ) -> None:
        super().__init__(**op_options)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device))


@CustomOp.register("gemma_rms_norm", dynamic_arg_dims=_TOKENS)
class GemmaRMSNorm(_RootMeanSquareNorm):
    """Root-mean-square norm as in Gemma: a weight around zero, applied in fp32 as ``1 + weight``.

    Called as :class:`RMSNorm`, and raises what that does. Rounded to the dtype of ``x`` once, at
    the end. A new one has the weight 0, which leaves the normed values as they are.
    """

    variant = "gemma"

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **op_options: bool,
    ) -> None:
        super().__init__(**op_options)
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))


@CustomOp.register("layer_norm", dynamic_arg_dims=_TOKENS)
class LayerNorm(CustomOp):
    """Layer norm (arXiv:1607.06450), optionally of ``x + residual``.

    ``norm(x)`` returns the normed ``x``; ``norm(x, residual)`` returns ``(normed, x + residual)``.
    ``x`` and ``residual``: ``[..., hidden_size]``, of one shape. Computed in fp32 and rounded once,
    as :class:`torch.nn.LayerNorm`, whose parameters and state it has.

    Raises ``OpValueError`` for an input of another width, and for a residual of another shape.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **op_options: bool,
    ) -> None:
        super().__init__(**op_options)
        self.hidden_size, self.eps = hidden_size, eps
        ones = torch.ones(hidden_size, dtype=dtype, device=device)
        self.register_parameter("weight", nn.Parameter(ones) if elementwise_affine else None)
        zeros = nn.Parameter(torch.zeros_like(ones)) if elementwise_affine and bias else None
        self.register_parameter("bias", zeros)

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        _check(self, self.hidden_size, x, residual)
        if residual is None:
            return native.layer_norm(x, self.weight, self.bias, self.eps)
        return native.fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def forward_cpu(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        _check(self, self.hidden_size, x, residual)
        ops = torch.ops.compilepass
        result: Tensor | tuple[Tensor, Tensor] = (
            ops.layer_norm(x, self.weight, self.bias, self.eps)
            if residual is None
            else ops.fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)
        )
        return result

    forward_cuda = forward_cpu

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, elementwise_affine={self.weight is not None}, "
            f"bias={self.bias is not None}"
        )


def _check(op: CustomOp, hidden_size: int, x: Tensor, residual: Tensor | None) -> None:
    # Native code would broadcast some of these silently.
    called = f"{type(op).__name__}({hidden_size})"
    if x.shape[-1:] != (hidden_size,):
        raise OpValueError(
            f"{called} got x of the shape {tuple(x.shape)}",
            why="It normalises the last dim, which has one weight for each element.",
            hint=f"Give x of the shape [..., {hidden_size}].",
        )
    if residual is not None and residual.shape != x.shape:
        raise OpValueError(
            f"{called} got x of the shape {tuple(x.shape)} and a residual of the shape "
            f"{tuple(residual.shape)}",
            why="The residual is added to x element by element.",
            hint="Give both the same shape.",
        )
