"""Normalisation over the last dim, with the residual addition that comes before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import OpValueError
from ..kernels import native
from ..ops import CustomOp

__all__ = ["RMSNorm"]


@CustomOp.register("rms_norm", dynamic_arg_dims={"x": {0: "tokens"}, "residual": {0: "tokens"}})
class RMSNorm(CustomOp):
    """Root-mean-square norm (arXiv:1910.07467), optionally of ``x + residual``.

    ``norm(x)`` returns the normed ``x``; ``norm(x, residual)`` returns ``(normed, x + residual)``.
    ``x`` and ``residual``: ``[..., hidden_size]``, of one shape. Computed in fp32 and rounded to
    the dtype of ``x`` before the weight is applied, as in Llama.

    Raises ``OpValueError`` for an input of another width, and for a residual of another shape.
    """

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

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        self._check(x, residual)
        if residual is None:
            return native.rms_norm(x, self.weight, self.eps)
        return native.fused_add_rms_norm(x, residual, self.weight, self.eps)

    def forward_cpu(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        self._check(x, residual)
        ops = torch.ops.compilepass
        result: Tensor | tuple[Tensor, Tensor] = (
            ops.rms_norm(x, self.weight, self.eps)
            if residual is None
            else ops.fused_add_rms_norm(x, residual, self.weight, self.eps)
        )
        return result

    forward_cuda = forward_cpu

    def _check(self, x: Tensor, residual: Tensor | None) -> None:
        # Native code would broadcast some of these silently.
        hidden_size = self.weight.shape[0]
        if x.shape[-1:] != (hidden_size,):
            raise OpValueError(
                f"RMSNorm({hidden_size}) got x of the shape {tuple(x.shape)}",
                why="It normalises the last dim, which has one weight for each element.",
                hint=f"Give x of the shape [..., {hidden_size}].",
            )
        if residual is not None and residual.shape != x.shape:
            raise OpValueError(
                f"RMSNorm({hidden_size}) got x of the shape {tuple(x.shape)} and a residual of "
                f"the shape {tuple(residual.shape)}",
                why="The residual is added to x element by element.",
                hint="Give both the same shape.",
            )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
