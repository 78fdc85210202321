"""A linear layer with an int8 weight, written in native ops, becomes one call that reads int8.

Before::

    y = (x @ wq.to(dtype).t()) * wscale + bias                  # as gpt-fast and torchao write it
    y = x @ (wq.to(dtype) * wscale[:, None]).t() + bias         # dequantised first
    y = ((x.float() @ wq.float().t()) * wscale + bias.float()).to(dtype)

After::

    y = compilepass.weight_only_int8_linear(x, wq, wscale, bias)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compilepass import FusionPass, Input, Match, PassContext, Reject, Rule
from compilepass.kernels import native

__all__ = ["FuseWeightOnlyLinear"]


class FuseWeightOnlyLinear(FusionPass):
    """Scales of the output or of the weight, in its dtype or in float32, with and without bias.

    Platforms: where the op has a kernel, which is the CPU. ``x``: ``[..., K]`` in float32, bfloat16
    or float16; ``wq``: int8 ``[N, K]``, row by row in memory; ``wscale``: a value a row. The op
    adds up and scales in float32 and rounds once, where most spellings do two or three times.
    """

    name = "fuse_weight_only_linear"
    after = ("fuse_int8_linear",)
    requires = ("eliminate_common_subexpressions",)
    kernels = ("compilepass::weight_only_int8_linear",)

    def rules(self, ctx: PassContext) -> Sequence[Rule]:
        # what computes more comes first, since it holds what the others look for
        both = (True, False)
        rules = [_rule(s, with_bias) for with_bias in both for s in _SPELLINGS[with_bias]]
        if hasattr(torch.ops.quantized_decomposed, "dequantize_per_channel"):  # someone uses it
            rules += [_rule_of_pt2e(with_bias) for with_bias in both]
        return rules


def scaled_output(x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None) -> Tensor:
    return _plus((x @ wq.to(x.dtype).t()) * wscale, bias)


def scaled_output_transposed(
    x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None
) -> Tensor:
    return _plus((x @ wq.t().to(x.dtype)) * wscale, bias)


def scaled_weight(x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None) -> Tensor:
    return _plus(x @ (wq.to(x.dtype) * wscale.unsqueeze(-1)).t(), bias)


def weight_scaled_in_float(
    x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None
) -> Tensor:
    return _plus(x @ (wq.float() * wscale.unsqueeze(-1)).to(x.dtype).t(), bias)


def product_scaled_in_float(
    x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None
) -> Tensor:
    return _plus((x @ wq.to(x.dtype).t()) * wscale, bias).to(x.dtype)


def rounded_before_bias(
    x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None
) -> Tensor:
    return _plus(product_scaled_in_float(x, wq, wscale), bias)


def in_float(x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None) -> Tensor:
    return native.weight_only_int8_linear(x, wq, wscale, bias)


#: those that differ from the others in half precision only, where they round elsewhere
_OF_HALF = (in_float, rounded_before_bias, product_scaled_in_float, weight_scaled_in_float)

#: by whether there is a bias
_SPELLINGS = {
    True: (*_OF_HALF, scaled_output, scaled_output_transposed, scaled_weight),
    False: (
        *(s for s in _OF_HALF if s is not rounded_before_bias),
        *(scaled_output, scaled_output_transposed, scaled_weight),
    ),
}


def _plus(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias


def fused(x: Tensor, wq: Tensor, wscale: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.compilepass.weight_only_int8_linear(x, wq, wscale.float(), bias)  # type: ignore[no-any-return]


def lies_in_rows(match: Match) -> Reject | None:
    weight = match.inputs["wq"].meta["val"]
    if weight.is_contiguous():
        return None
    return match.reject(
        "the weight does not lie row by row in memory, and would be copied at each call",
        hint="Store it as [out_features, in_features].",
    )


def _rule(spelling: Callable[..., Tensor], with_bias: bool) -> Rule:
    half = (torch.bfloat16, torch.float16)
    of_half = spelling in _OF_HALF
    inputs: dict[str, Input] = {
        "x": Input(("T", "K")),
        "wq": Input(("N", "K"), torch.int8),
        "wscale": Input(("N",), torch.float32 if of_half else None),
    }
    if with_bias:
        inputs["bias"] = Input(("N",))
    return Rule(
        spelling,
        fused,
        inputs,
        check=lies_in_rows,
        name=spelling.__name__ + ("_bias" if with_bias else ""),
        dtypes=half if of_half else (*half, torch.float32),
    )


def dequantised_channels(
    x: Tensor, wq: Tensor, wscale: Tensor, zero_points: Tensor, bias: Tensor | None = None
) -> Tensor:
    weight = torch.ops.quantized_decomposed.dequantize_per_channel(
        wq, wscale, zero_points, 0, -128, 127, torch.int8
    )
    return _plus(x @ weight.t(), bias)


def fused_with_zero_points(
    x: Tensor, wq: Tensor, wscale: Tensor, zero_points: Tensor, bias: Tensor | None = None
) -> Tensor:
    # they are 0 as a rule, which is not known before the graph runs
    return fused(x, wq, wscale, bias) - x.sum(-1, keepdim=True) * (zero_points * wscale)


def _rule_of_pt2e(with_bias: bool) -> Rule:
    """For the ops that ``convert_pt2e`` leaves in a model, which dequantise in float32."""
    channels = {"wscale": torch.float32, "zero_points": torch.int64}
    inputs = {
        "x": Input(("T", "K")),
        "wq": Input(("N", "K"), torch.int8),
        **{name: Input(("N",), dtype) for name, dtype in channels.items()},
    }
    if with_bias:
        inputs["bias"] = Input(("N",))
    return Rule(
        dequantised_channels,
        fused_with_zero_points,
        inputs,
        check=lies_in_rows,
        name="dequantised_channels" + ("_bias" if with_bias else ""),
        dtypes=(torch.float32,),
    )
