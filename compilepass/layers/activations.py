"""Activations, and gated ones: one part of the last dim activated, times the other."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import OpValueError, did_you_mean
from ..kernels import native
from ..ops import CustomOp

__all__ = [
    "FastGELU",
    "FatreluAndMul",
    "GeluAndMul",
    "MulAndSilu",
    "NewGELU",
    "QuickGELU",
    "ReLUSquaredActivation",
    "SiluAndMul",
    "SwigluOAIAndMul",
]

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


@CustomOp.register("mul_and_silu", dynamic_arg_dims={"x": 0})
class MulAndSilu(CustomOp):
    """SwiGLU's gate with the gate last: ``x[..., :I] * silu(x[..., I:])``.

    ``x``: ``[..., 2 * I]``, result: ``[..., I]`` of the same dtype.

    Raises ``OpValueError`` for an odd width.
    """

    def forward_native(self, x: Tensor) -> Tensor:
        _check_halves(self, x)
        return native.mul_and_silu(x)

    def forward_cpu(self, x: Tensor) -> Tensor:
        _check_halves(self, x)
        gated: Tensor = torch.ops.compilepass.mul_and_silu(x)
        return gated

    forward_cuda = forward_cpu


@CustomOp.register("fatrelu_and_mul", dynamic_arg_dims={"x": 0})
class FatreluAndMul(CustomOp):
    """FATReLU's gate (ProSparse, arXiv:2402.13516): ``x[..., :I] * x[..., I:]`` where
    ``x[..., :I] > threshold``, and 0 elsewhere.

    ``x``: ``[..., 2 * I]``, result: ``[..., I]`` of the same dtype.

    Raises ``OpValueError`` for an odd width.
    """

    def __init__(self, threshold: float = 0.0, **op_options: bool) -> None:
        super().__init__(**op_options)
        self.threshold = float(threshold)

    def forward_native(self, x: Tensor) -> Tensor:
        _check_halves(self, x)
        return native.fatrelu_and_mul(x, self.threshold)

    def forward_cpu(self, x: Tensor) -> Tensor:
        _check_halves(self, x)
        gated: Tensor = torch.ops.compilepass.fatrelu_and_mul(x, self.threshold)
        return gated

    forward_cuda = forward_cpu

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}"


@CustomOp.register("swigluoai_and_mul", dynamic_arg_dims={"x": 0})
class SwigluOAIAndMul(CustomOp):
    """gpt-oss's gate: ``(value + 1) * gate * sigmoid(alpha * gate)`` of neighbours.

    ``gate`` is ``x[..., ::2]`` clamped to at most ``limit``, ``value`` is ``x[..., 1::2]`` clamped
    to ``±limit``. ``x``: ``[..., 2 * I]``, result: ``[..., I]`` of the same dtype.

    Raises ``OpValueError`` for an odd width and for a negative ``limit``.
    """

    def __init__(self, alpha: float = 1.702, limit: float = 7.0, **op_options: bool) -> None:
        if not limit >= 0:
            raise OpValueError(
                f"SwigluOAIAndMul got limit={limit!r}",
                why="The value is clamped to what lies between -limit and limit.",
                hint="Give a limit of at least 0.",
            )
        super().__init__(**op_options)
        self.alpha, self.limit = float(alpha), float(limit)

    def forward_native(self, x: Tensor) -> Tensor:
        _check_halves(self, x)
        return native.swigluoai_and_mul(x, self.alpha, self.limit)

    def forward_cpu(self, x: Tensor) -> Tensor:
        _check_halves(self, x)
        gated: Tensor = torch.ops.compilepass.swigluoai_and_mul(x, self.alpha, self.limit)
        return gated

    forward_cuda = forward_cpu

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, limit={self.limit}"


@CustomOp.register("gelu_new", dynamic_arg_dims={"x": 0})
class NewGELU(CustomOp):
    """GELU's tanh approximation as GPT-2 writes it (arXiv:1606.08415).

    ``x``: ``[...]``, result: the same shape and dtype.
    """

    def forward_native(self, x: Tensor) -> Tensor:
        return native.gelu_new(x)

    def forward_cpu(self, x: Tensor) -> Tensor:
        activated: Tensor = torch.ops.compilepass.gelu_new(x)
        return activated

    forward_cuda = forward_cpu


@CustomOp.register("gelu_fast", dynamic_arg_dims={"x": 0})
class FastGELU(CustomOp):
    """GELU's tanh approximation as Hugging Face's ``FastGELUActivation`` writes it.

    ``x``: ``[...]``, result: the same shape and dtype.
    """

    def forward_native(self, x: Tensor) -> Tensor:
        return native.gelu_fast(x)

    def forward_cpu(self, x: Tensor) -> Tensor:
        activated: Tensor = torch.ops.compilepass.gelu_fast(x)
        return activated

    forward_cuda = forward_cpu


@CustomOp.register("quick_gelu", dynamic_arg_dims={"x": 0})
class QuickGELU(CustomOp):
    """``x * sigmoid(1.702 * x)``, GELU as in CLIP (arXiv:1606.08415).

    ``x``: ``[...]``, result: the same shape and dtype.
    """

    def forward_native(self, x: Tensor) -> Tensor:
        return native.quick_gelu(x)

    def forward_cpu(self, x: Tensor) -> Tensor:
        activated: Tensor = torch.ops.compilepass.quick_gelu(x)
        return activated

    forward_cuda = forward_cpu


@CustomOp.register("relu2", dynamic_arg_dims={"x": 0})
class ReLUSquaredActivation(CustomOp):
    """``relu(x) ** 2`` (Primer, arXiv:2109.08668).

    ``x``: ``[...]``, result: the same shape and dtype.
    """

    def forward_native(self, x: Tensor) -> Tensor:
        return native.relu2(x)

    def forward_cpu(self, x: Tensor) -> Tensor:
        activated: Tensor = torch.ops.compilepass.relu2(x)
        return activated

    forward_cuda = forward_cpu


def _check_halves(op: CustomOp, x: Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise OpValueError(
            f"{type(op).__name__} got x of the shape {tuple(x.shape)}",
            why="The last dim holds the gate and the value, which are equally wide.",
            hint="Give x of the shape [..., 2 * I].",
        )
