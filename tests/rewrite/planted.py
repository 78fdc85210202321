"""What :mod:`.test_properties` plants in random programs: patterns, and what only looks like one.

A plant is a function of two rows of one shape and a weight; ``kernels`` says which kind of kernel
takes its place. A near miss is the same with what little is to be found in it, often nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .spellings import (
    EPS,
    rms_norm_gemma,
    rms_norm_llama,
    rms_norm_over_root,
    rms_norm_sum_over_count,
    rms_norm_torch,
)

__all__ = ["FAMILIES", "MISSES", "PLANTS", "Plant", "found"]

#: the kind of each kernel; which one it is depends on what stands around the plant
FAMILIES = {
    "rms_norm": "norm",
    "fused_add_rms_norm": "norm",
    "rms_norm_dynamic_int8_quant": "norm and quant",
    "fused_add_rms_norm_dynamic_int8_quant": "norm and quant",
    "silu_mul": "gate",
    "silu_and_mul": "gate",
    "silu_mul_dynamic_int8_quant": "gate and quant",
    "silu_and_mul_dynamic_int8_quant": "gate and quant",
    "gelu_mul": "gelu",
    "gelu_and_mul": "gelu",
}


def found(kernels: dict[str, int]) -> Counter[str]:
    """The kernels of a graph by their kind."""
    kinds: Counter[str] = Counter()
    for name, count in kernels.items():
        kinds[FAMILIES.get(name, name)] += count
    return kinds


@dataclass(frozen=True)
class Plant:
    """``goes_on``: later steps may use the first output.

    ``scale`` sets the input apart: patterns of one kind may have the same input, those of different
    kinds would share what each has inside.
    """

    fn: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    kernels: tuple[str, ...]
    scale: float
    goes_on: bool


PLANTS: dict[str, Plant] = {}
MISSES: dict[str, Plant] = {}


def plant(
    kernel: str, *, scale: float = 1.0, goes_on: bool = True
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return _into(PLANTS, (kernel,), scale, goes_on)


def miss(
    *kernels: str, goes_on: bool = True
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """A near miss: its input is its own, since a value that it shares with a plant blocks that."""
    return _into(MISSES, kernels, 1 + (len(MISSES) + 1) / 64, goes_on)


def _into(
    table: dict[str, Plant], kernels: tuple[str, ...], scale: float, goes_on: bool
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    def enter(fn: Callable[..., object]) -> Callable[..., object]:
        def outputs(a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            out = fn(a, b, w)
            return out if isinstance(out, tuple) else (out,)  # type: ignore[return-value]

        table[fn.__name__] = Plant(outputs, kernels, scale, goes_on)
        return fn

    return enter


def _quantised(x: Tensor, low: float = -128, high: float = 127) -> tuple[Tensor, Tensor]:
    x32 = x.float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return torch.round(x32 / scale).clamp(low, high).to(torch.int8), scale


def _normed(x: Tensor, dim: int = -1, eps: float = EPS) -> Tensor:
    x32 = x.float()
    return x32 * torch.rsqrt(x32.pow(2).mean(dim, keepdim=True) + eps)


# -- plants --------------------------------------------------------------------------------------


@plant("norm")
def llama_norm(a: Tensor, b: Tensor, w: Tensor) -> object:
    return rms_norm_llama(a, w)


@plant("norm")
def norm_over_root(a: Tensor, b: Tensor, w: Tensor) -> object:
    return rms_norm_over_root(a, w)


@plant("norm")
def norm_of_sum(a: Tensor, b: Tensor, w: Tensor) -> object:
    return rms_norm_sum_over_count(a + b, w)


@plant("norm", scale=1.25)
def torch_norm(a: Tensor, b: Tensor, w: Tensor) -> object:
    return rms_norm_torch(a, w)


@plant("norm", scale=0.75)
def gemma_norm(a: Tensor, b: Tensor, w: Tensor) -> object:
    return rms_norm_gemma(a, w)


@plant("norm", scale=0.75)
def gemma_norm_of_sum(a: Tensor, b: Tensor, w: Tensor) -> object:
    return rms_norm_gemma(a + b, w)


@plant("norm and quant", scale=0.5, goes_on=False)
def quantised_norm(a: Tensor, b: Tensor, w: Tensor) -> object:
    return _quantised(rms_norm_llama(a, w))


@plant("norm and quant", scale=1.5, goes_on=False)
def quantised_torch_norm(a: Tensor, b: Tensor, w: Tensor) -> object:
    return _quantised(rms_norm_torch(a + b, w), -127, 127)


@plant("norm and quant", scale=0.625, goes_on=False)
def quantised_gemma_norm(a: Tensor, b: Tensor, w: Tensor) -> object:
    return _quantised(rms_norm_gemma(a, w))


@plant("gate")
def gate(a: Tensor, b: Tensor, w: Tensor) -> object:
    return F.silu(a * w) * b


@plant("gate")
def gate_of_halves(a: Tensor, b: Tensor, w: Tensor) -> object:
    left, right = torch.cat((a, b * w), -1).chunk(2, -1)
    return left * torch.sigmoid(left) * right


@plant("gelu")
def gelu_gate(a: Tensor, b: Tensor, w: Tensor) -> object:
    return b * F.gelu(a * w, approximate="tanh")


@plant("gate and quant", goes_on=False)
def quantised_gate(a: Tensor, b: Tensor, w: Tensor) -> object:
    return _quantised(F.silu(a * w) * b)


# -- norms that are none -------------------------------------------------------------------------


@miss()
def norm_of_columns(a: Tensor, b: Tensor, w: Tensor) -> object:
    return w * _normed(a, 0).to(a.dtype)


@miss()
def norm_of_all(a: Tensor, b: Tensor, w: Tensor) -> object:
    a32 = a.float()
    return w * (a32 * torch.rsqrt(a32.pow(2).mean() + EPS)).to(a.dtype)


@miss()
def norm_with_alpha(a: Tensor, b: Tensor, w: Tensor) -> object:
    a32 = a.float()
    variance = torch.add(a32.pow(2).mean(-1, keepdim=True), EPS, alpha=2)
    return w * (a32 * torch.rsqrt(variance)).to(a.dtype)


@miss()
def norm_with_weighted_eps(a: Tensor, b: Tensor, w: Tensor) -> object:
    a32 = a.float()
    variance = a32.pow(2).mean(-1, keepdim=True) + b.float().abs().amax()
    return w * (a32 * torch.rsqrt(variance)).to(a.dtype)


@miss(goes_on=False)
def norm_of_wider_weight(a: Tensor, b: Tensor, w: Tensor) -> object:
    return w.double() * _normed(a).to(a.dtype)


@miss()
def norm_weighted_along_rows(a: Tensor, b: Tensor, w: Tensor) -> object:
    return w[: a.shape[0], None] * _normed(a).to(a.dtype)


@miss()
def norm_whose_inside_is_returned(a: Tensor, b: Tensor, w: Tensor) -> object:
    normed = _normed(a).to(a.dtype)
    return w * normed, normed


@miss()
def norm_whose_root_is_returned(a: Tensor, b: Tensor, w: Tensor) -> object:
    a32 = a.float()
    root = torch.rsqrt(a32.pow(2).mean(-1, keepdim=True) + EPS)
    return w * (a32 * root).to(a.dtype), root


@miss()
def norm_without_eps(a: Tensor, b: Tensor, w: Tensor) -> object:
    a32 = a.float()
    return w * (a32 * torch.rsqrt(a32.pow(2).mean(-1, keepdim=True))).to(a.dtype)


@miss()
def norm_of_cubes(a: Tensor, b: Tensor, w: Tensor) -> object:
    a32 = a.float()
    return w * (a32 * torch.rsqrt(a32.abs().pow(3).mean(-1, keepdim=True) + EPS)).to(a.dtype)


@miss()
def norm_by_another_count(a: Tensor, b: Tensor, w: Tensor) -> object:
    a32 = a.float()
    variance = a32.pow(2).sum(-1, keepdim=True) / (a.shape[-1] - 1)
    return w * (a32 * torch.rsqrt(variance + EPS)).to(a.dtype)


@miss()
def norm_of_another_value(a: Tensor, b: Tensor, w: Tensor) -> object:
    a32 = a.float()
    return w * (b.float() * torch.rsqrt(a32.pow(2).mean(-1, keepdim=True) + EPS)).to(a.dtype)


@miss()
def norm_plus_weight(a: Tensor, b: Tensor, w: Tensor) -> object:
    return w + _normed(a).to(a.dtype)


# -- quantisations that are none -----------------------------------------------------------------


@miss("norm", goes_on=False)
def quantised_to_other_bounds(a: Tensor, b: Tensor, w: Tensor) -> object:
    return _quantised(rms_norm_llama(a, w), -100, 100)


@miss("norm", goes_on=False)
def quantised_in_other_steps(a: Tensor, b: Tensor, w: Tensor) -> object:
    x32 = rms_norm_torch(a, w).float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 120
    return torch.round(x32 / scale).clamp(-128, 127).to(torch.int8), scale


@miss("norm", goes_on=False)
def quantised_with_another_least_scale(a: Tensor, b: Tensor, w: Tensor) -> object:
    x32 = rms_norm_llama(a, w).float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 127
    return torch.round(x32 / scale).clamp(-128, 127).to(torch.int8), scale


@miss("norm", goes_on=False)
def quantised_by_columns(a: Tensor, b: Tensor, w: Tensor) -> object:
    x32 = rms_norm_gemma(a, w).float()
    scale = x32.abs().amax(0, keepdim=True).clamp(min=1e-5) / 127
    return torch.round(x32 / scale).clamp(-128, 127).to(torch.int8), scale


@miss("norm", goes_on=False)
def quantised_by_another_scale(a: Tensor, b: Tensor, w: Tensor) -> object:
    _, scale = _quantised(b)
    return torch.round(rms_norm_llama(a, w).float() / scale).clamp(-128, 127).to(torch.int8)


@miss("norm", goes_on=False)
def quantised_without_magnitude(a: Tensor, b: Tensor, w: Tensor) -> object:
    x32 = rms_norm_llama(a, w).float()
    scale = x32.amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return torch.round(x32 / scale).clamp(-128, 127).to(torch.int8), scale


@miss("norm", goes_on=False)
def quantised_downwards(a: Tensor, b: Tensor, w: Tensor) -> object:
    x32 = rms_norm_llama(a, w).float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return torch.floor(x32 / scale).clamp(-128, 127).to(torch.int8), scale


@miss("norm")
def quantised_and_returned(a: Tensor, b: Tensor, w: Tensor) -> object:
    normed = rms_norm_llama(a, w)
    return normed, *_quantised(normed)


@miss("gate", goes_on=False)
def gate_quantised_to_other_bounds(a: Tensor, b: Tensor, w: Tensor) -> object:
    return _quantised(F.silu(a * w) * b, -100, 100)


# -- gates that are none -------------------------------------------------------------------------


@miss()
def gate_of_relu(a: Tensor, b: Tensor, w: Tensor) -> object:
    return torch.relu(a * w) * b


@miss()
def gate_that_adds(a: Tensor, b: Tensor, w: Tensor) -> object:
    return F.silu(a * w) + b


@miss()
def gate_of_scaled_sigmoid(a: Tensor, b: Tensor, w: Tensor) -> object:
    x = a * w
    return x * torch.sigmoid(1.702 * x) * b


@miss()
def gate_of_one_column(a: Tensor, b: Tensor, w: Tensor) -> object:
    return F.silu(a * w) * b[:, :1]


@miss()
def gate_whose_inside_is_returned(a: Tensor, b: Tensor, w: Tensor) -> object:
    inside = F.silu(a * w)
    return inside * b, inside


@miss()
def gate_with_alpha(a: Tensor, b: Tensor, w: Tensor) -> object:
    x = a * w
    return x / torch.add(torch.ones_like(x), torch.exp(-x), alpha=2) * b
