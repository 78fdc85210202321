"""The native form of an fp8 linear layer becomes one fp8 matrix multiplication.

Before::

    y = ((xq.float() @ wq.float().t()) * xscale * wscale + bias).to(dtype)
    y = _scaled_mm(xq, wq.t(), xscale, wscale, bias, out_dtype=dtype)

After::

    y = compilepass.fp8_linear(xq, xscale, wq, wscale, bias, dtype)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from compilepass import FusionPass, Input, Match, PassContext, Reject, Rule
from compilepass.kernels import native

__all__ = ["FuseFp8Linear"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Spelling = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | None", torch.dtype], Tensor]
Shape = tuple[str | int, ...]


class FuseFp8Linear(FusionPass):
    """A scale for each token, or a known one for all; for each channel of the weight, or for all.

    Platforms: the CPU; written in float, also CUDA and ROCm where ``torch._scaled_mm`` multiplies
    such operands, which is then what runs. Both operands are ``float8_e4m3fn`` and scales float32;
    the result is float32, bfloat16 or float16.
    """

    name = "fuse_fp8_linear"
    after = ("fuse_norm_quant", "fuse_act_quant")
    kernels = ("compilepass::fp8_linear",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        # the bias has the dtype of the result; without one, float32 is a part of the others
        return [
            _rule(spelling, xscale, wscale, dtype)
            for dtype in (None, *_DTYPES)
            for spelling, scales in _SCALES.items()
            for xscale, wscale in scales
        ]


def in_float(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return native.fp8_linear(xq, xscale, wq, wscale, bias, dtype)


def scaled_mm(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return torch._scaled_mm(xq, wq.t(), xscale, wscale, bias=bias, out_dtype=dtype)


def scaled_mm_fast(
    xq: Tensor,
    xscale: Tensor,
    wq: Tensor,
    wscale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return torch._scaled_mm(
        xq,
        wq.t(),
        xscale,
        wscale,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


_TOKEN, _CHANNEL, _ONE = ("T", 1), (1, "N"), ()
_AS_SCALED_MM = ((_TOKEN, _CHANNEL), (_ONE, _ONE), ((1,), (1,)))  # it tells shapes apart

#: the shapes of scales that are looked for in each spelling
_SCALES: dict[Spelling, Sequence[tuple[Shape, Shape]]] = {
    in_float: tuple(product((_TOKEN, _ONE), (_CHANNEL, _ONE))),
    scaled_mm: _AS_SCALED_MM,
    scaled_mm_fast: _AS_SCALED_MM,
}


def _on_the_cpu(match: Match) -> Reject | None:
    if match.device.type == "cpu":
        return None
    return match.reject("torch._scaled_mm is the kernel that would run")


def _rule(
    spelling: Spelling, xscale_shape: Shape, wscale_shape: Shape, out_dtype: torch.dtype | None
) -> Rule:
    """A rule for results of ``out_dtype``, or with a bias of their dtype where it is ``None``."""
    a_token, a_channel = xscale_shape == _TOKEN, wscale_shape == _CHANNEL

    def pattern(
        xq: Tensor, xscale: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return spelling(xq, xscale, wq, wscale, bias, _dtype_of(bias, out_dtype))

    def fused(
        xq: Tensor, xscale: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if not a_token:
            xscale = xscale.reshape(1)
        wscale = wscale.reshape(-1)
        if not a_channel:
            wscale = wscale.expand(wq.shape[0])
        dtype = _dtype_of(bias, out_dtype)
        return torch.ops.compilepass.fp8_linear(xq, xscale, wq, wscale, bias, dtype)  # type: ignore[no-any-return]

    inputs = {
        "xq": Input(("T", "K"), native.FP8),
        "xscale": Input(xscale_shape, torch.float32),
        "wq": Input(("N", "K"), native.FP8),
        "wscale": Input(wscale_shape, torch.float32),
    }
    if out_dtype is None:
        inputs["bias"] = Input(("N",))
    what = [spelling.__name__, "token" if a_token else "tensor"]
    what += ["channel" if a_channel else "tensor", *["1d"] * (xscale_shape == (1,))]
    what += ["bias" if out_dtype is None else str(out_dtype).removeprefix("torch.")]
    return Rule(
        pattern,
        fused,
        inputs,
        check=None if spelling is in_float else _on_the_cpu,
        name="_".join(what),
        dtypes=_DTYPES,
    )


def _dtype_of(bias: Tensor | None, dtype: torch.dtype | None) -> torch.dtype:
    if bias is not None:
        return bias.dtype
    assert dtype is not None
    return dtype
