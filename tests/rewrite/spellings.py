"""Ways to write the same thing, as they are found in models, with the kernels they must reach.

A spelling is a function of the tensors that :func:`inputs` makes; ``WIDTH`` is their last dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

WIDTH = 48
EPS = 1e-6

Kernels = dict[str, int]


@dataclass(frozen=True)
class Spelling:
    """``kernels`` says how often each op must be called, and no other."""

    fn: Callable[..., Any]
    tensors: tuple[str, ...]
    kernels: Kernels


SPELLINGS: dict[str, Spelling] = {}


def spelling(tensors: str, kernels: Kernels) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function: its tensors by name, as in :func:`inputs`."""

    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        assert fn.__name__ not in SPELLINGS
        SPELLINGS[fn.__name__] = Spelling(fn, tuple(tensors.split()), kernels)
        return fn

    return enter


def inputs(s: Spelling, dtype: torch.dtype, rank: int) -> list[Tensor]:
    """Rows ``[5, WIDTH]`` or ``[2, 3, WIDTH]`` for ``x`` and ``r``, weights ``[WIDTH]`` for ``w``
    and ``v``, matrices ``[WIDTH, WIDTH]`` for ``m`` and ``n``; widths are static, as a model's are.
    """
    rows = (5,) if rank == 2 else (2, 3)
    shapes = {
        "x": (*rows, WIDTH),
        "r": (*rows, WIDTH),
        "w": (WIDTH,),
        "v": (WIDTH,),
        "m": (WIDTH, WIDTH),
        "n": (WIDTH, WIDTH),
    }
    tensors = [torch.randn(shapes[name]).to(dtype) for name in s.tensors]
    for name, tensor in zip(s.tensors, tensors, strict=True):
        for dim in range(tensor.dim()):
            if name not in "xr" or dim == tensor.dim() - 1:
                torch._dynamo.mark_static(tensor, dim)
    return tensors


# -- RMSNorm -------------------------------------------------------------------------------------

norm = spelling("x w", {"rms_norm": 1})


@norm
def rms_norm_llama(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


@norm
def rms_norm_weight_last(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.to(torch.float32)
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * w


@norm
def rms_norm_larger_eps(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


@norm
def rms_norm_odd_eps(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (x32 * torch.rsqrt(3.217e-4 + x32.pow(2).mean(-1, keepdim=True))).to(x.dtype)


@norm
def rms_norm_product(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + EPS) * x32).to(x.dtype)


@norm
def rms_norm_square(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (x32 * (x32.square().mean(-1, True) + EPS).rsqrt()).type_as(x)


@norm
def rms_norm_power_operator(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (x32 * torch.rsqrt((x32**2.0).mean(-1, keepdim=True) + EPS)).to(x.dtype)


@norm
def rms_norm_positive_dim(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    variance = x32.pow(2).mean(x.dim() - 1, keepdim=True)
    return w * (x32 * torch.rsqrt(variance + EPS)).to(x.dtype)


@norm
def rms_norm_unsqueezed(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (x32 * torch.rsqrt(x32.pow(2).mean(-1) + EPS).unsqueeze(-1)).to(x.dtype)


@norm
def rms_norm_sum_over_count(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    variance = x32.pow(2).sum(-1, keepdim=True) / x.shape[-1]
    return w * (x32 * torch.rsqrt(variance + EPS)).to(x.dtype)


@norm
def rms_norm_sum_times_inverse_count(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    variance = x32.pow(2).sum(-1, keepdim=True) * (1 / x.shape[-1])
    return w * (x32 * torch.rsqrt(variance + EPS)).to(x.dtype)


@norm
def rms_norm_sum_times_written_inverse(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    variance = x32.pow(2).sum(-1, keepdim=True) * (1 / WIDTH)
    return w * (x32 * torch.rsqrt(variance + EPS)).to(x.dtype)


@norm
def rms_norm_over_root(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (x32 / torch.sqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


@norm
def rms_norm_reciprocal_of_root(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    root = torch.sqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return w * (x32 * torch.reciprocal(root)).to(x.dtype)


@norm
def rms_norm_one_over_root(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (x32 * (1.0 / (x32.pow(2).mean(-1, keepdim=True) + EPS).sqrt())).to(x.dtype)


@norm
def rms_norm_negative_power(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    return w * (x32 * (x32.pow(2).mean(-1, keepdim=True) + EPS) ** -0.5).to(x.dtype)


@norm
def rms_norm_through_views(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float().view(-1, x.shape[-1])
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return w * normed.unsqueeze(0).squeeze(0).to(x.dtype).reshape(x.shape)


@norm
def rms_norm_through_noop_transpose(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float().unsqueeze(0).transpose(0, 1)  # the dim that moves is of size 1
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return w.view(1, -1) * normed.transpose(1, 0).squeeze(0).to(x.dtype)


@norm
def rms_norm_mean_of_dim_1(x: Tensor, w: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).float()
    root = torch.rsqrt(rows.pow(2).mean(1) + EPS)
    return w * (rows * root[:, None]).to(x.dtype).reshape(x.shape)


@norm
def rms_norm_of_transposed_copy(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm_llama(x.transpose(0, -2).contiguous(), w)


@norm
def rms_norm_transposed_afterwards(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm_llama(x, w).transpose(-1, -2)


class RMSNorm(nn.Module):
    """With its eps as an attribute, which Dynamo makes an input under ``dynamic=True``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = EPS

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        root = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x32 * root).to(x.dtype)


MODULE = RMSNorm()
TORCH_MODULE = nn.RMSNorm(WIDTH, eps=EPS)
TORCH_MODULE_DEFAULT_EPS = nn.RMSNorm(WIDTH)


@norm
def rms_norm_module(x: Tensor, w: Tensor) -> Tensor:
    return functional_call(MODULE, {"weight": w}, (x,))  # type: ignore[no-any-return]


# -- RMSNorm, rounded after the weight -----------------------------------------------------------


@norm
def rms_norm_torch(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, EPS)


@norm
def rms_norm_torch_default_eps(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w)


@norm
def rms_norm_torch_module(x: Tensor, w: Tensor) -> Tensor:
    return functional_call(TORCH_MODULE, {"weight": w}, (x,))  # type: ignore[no-any-return]


@norm
def rms_norm_torch_module_default_eps(x: Tensor, w: Tensor) -> Tensor:
    module = TORCH_MODULE_DEFAULT_EPS
    return functional_call(module, {"weight": w}, (x,))  # type: ignore[no-any-return]


@norm
def rms_norm_cast_last(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return (w.float() * normed).to(x.dtype)


@norm
def rms_norm_gemma(x: Tensor, w: Tensor) -> Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * (1.0 + w.float())).type_as(x)


# -- RMSNorm after an addition -------------------------------------------------------------------

add_norm = spelling("x r w", {"fused_add_rms_norm": 1})


@add_norm
def add_rms_norm_both_returned(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = r + x
    return rms_norm_llama(total, w), total


@add_norm
def add_rms_norm_sum_dropped(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    return rms_norm_over_root(x + r, w)


@add_norm
def add_rms_norm_torch(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.add(x, r)
    return rms_norm_torch(total, w), total


@add_norm
def add_rms_norm_gemma(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return rms_norm_gemma(total, w), total * 2


# -- quantisation --------------------------------------------------------------------------------

norm_quant = spelling("x w", {"rms_norm_dynamic_int8_quant": 1})
Quantised = tuple[Tensor, Tensor]


def _steps(x32: Tensor, scale: Tensor) -> Tensor:
    return torch.round(x32 / scale).clamp(-128, 127).to(torch.int8)


@norm_quant
def quant_amax(x: Tensor, w: Tensor) -> Quantised:
    x32 = rms_norm_llama(x, w).float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return _steps(x32, scale), scale


@norm_quant
def quant_max_item(x: Tensor, w: Tensor) -> Quantised:
    x32 = rms_norm_llama(x, w).float()
    scale = x32.abs().max(dim=-1, keepdim=True)[0].clamp(min=1e-5) / 127.0
    return _steps(x32, scale), scale


@norm_quant
def quant_max_values(x: Tensor, w: Tensor) -> Quantised:
    x32 = rms_norm_llama(x, w).float()
    scale = torch.clamp(x32.abs().max(dim=-1, keepdim=True).values, min=1e-5) / 127.0
    return _steps(x32, scale), scale


@norm_quant
def quant_clamp_min(x: Tensor, w: Tensor) -> Quantised:
    x32 = rms_norm_torch(x, w).float()
    scale = x32.abs().amax(dim=-1, keepdim=True).clamp_min(1e-5).div(127)
    q = torch.clamp(torch.round(x32.div(scale)), min=-128, max=127)
    return q.to(torch.int8), scale


@norm_quant
def quant_times_inverse(x: Tensor, w: Tensor) -> Quantised:
    x32 = rms_norm_llama(x, w).float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) * (1 / 127)
    return torch.round(x32 * scale.reciprocal()).clamp(-128, 127).to(torch.int8), scale


@norm_quant
def quant_times_one_over_scale(x: Tensor, w: Tensor) -> Quantised:
    x32 = rms_norm_llama(x, w).float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return torch.round(x32 * (1 / scale)).clamp(-128, 127).to(torch.int8), scale


@norm_quant
def quant_symmetric_bounds(x: Tensor, w: Tensor) -> Quantised:
    x32 = rms_norm_gemma(x, w).float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return (x32 / scale).round().clamp(-127, 127).to(torch.int8), scale


@norm_quant
def quant_without_bounds(x: Tensor, w: Tensor) -> Quantised:
    x32 = rms_norm_llama(x, w).float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return (x32 / scale).round().to(torch.int8), scale


@norm_quant
def quant_scale_without_last_dim(x: Tensor, w: Tensor) -> Quantised:
    x32 = rms_norm_llama(x, w).float()
    scale = x32.abs().amax(-1).clamp(min=1e-5) / 127
    return _steps(x32, scale.unsqueeze(-1)), scale


@spelling("x r w", {"fused_add_rms_norm_dynamic_int8_quant": 1})
def quant_of_added_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = x + r
    return (*quant_max_values(total, w), total)


@spelling("x", {"silu_and_mul_dynamic_int8_quant": 1})
def quant_of_gate(x: Tensor) -> Quantised:
    gate, up = x.chunk(2, -1)
    x32 = (F.silu(gate) * up).float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return _steps(x32, scale), scale


@spelling("x r", {"silu_mul_dynamic_int8_quant": 1})
def quant_of_two_tensors_gate(x: Tensor, r: Tensor) -> Quantised:
    x32 = (F.silu(x) * r).float()
    scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return _steps(x32, scale), scale


# -- gated activations ---------------------------------------------------------------------------

halves = spelling("x", {"silu_and_mul": 1})
pair = spelling("x r", {"silu_mul": 1})


@halves
def silu_slices(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


@halves
def silu_chunk(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return up * F.silu(gate)


@halves
def silu_split(x: Tensor) -> Tensor:
    gate, up = torch.split(x, x.shape[-1] // 2, dim=-1)
    return F.silu(gate) * up


@halves
def silu_split_with_sizes(x: Tensor) -> Tensor:
    gate, up = x.split([x.shape[-1] // 2, x.shape[-1] // 2], dim=x.dim() - 1)
    return F.silu(gate) * up


@halves
def silu_unbind(x: Tensor) -> Tensor:
    gate, up = x.unflatten(-1, (2, x.shape[-1] // 2)).unbind(-2)
    return F.silu(gate) * up


@halves
def silu_select(x: Tensor) -> Tensor:
    parts = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return F.silu(parts[..., 0, :]) * parts[..., 1, :]


@halves
def silu_as_sigmoid(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


@halves
def silu_as_sigmoid_first(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return up * (gate.sigmoid() * gate)


@halves
def silu_as_exp(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


@halves
def silu_as_exp_reciprocal(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gate * (1.0 / (1.0 + (-gate).exp())) * up


@halves
def silu_computed_in_float(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate32 = gate.float()
    return (gate32 * torch.sigmoid(gate32)).to(x.dtype) * up


@pair
def silu_two_tensors(x: Tensor, r: Tensor) -> Tensor:
    return F.silu(x) * r


@pair
def silu_two_tensors_reversed(x: Tensor, r: Tensor) -> Tensor:
    return r * (x * torch.sigmoid(x))


@spelling("x", {"silu_mul": 1})
def silu_gate_in_second_half(x: Tensor) -> Tensor:
    up, gate = x.chunk(2, -1)
    return F.silu(gate) * up


@spelling("x m n", {"silu_mul": 1})
def silu_two_projections(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return F.silu(F.linear(x, m)) * F.linear(x, n)


@spelling("x m", {"silu_and_mul": 1})
def silu_one_projection(x: Tensor, m: Tensor) -> Tensor:
    gate, up = F.linear(x, m).chunk(2, -1)
    return F.silu(gate) * up


@spelling("x", {"gelu_and_mul": 1})
def gelu_chunk(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate) * up


@spelling("x", {"gelu_and_mul": 1})
def gelu_tanh_chunk(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return up * F.gelu(gate, approximate="tanh")


@spelling("x r", {"gelu_mul": 1})
def gelu_two_tensors(x: Tensor, r: Tensor) -> Tensor:
    return F.gelu(x) * r


@spelling("x m n", {"gelu_mul": 1})
def gelu_tanh_two_projections(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return F.gelu(F.linear(x, m), approximate="tanh") * F.linear(x, n)


# -- several sites -------------------------------------------------------------------------------


@spelling("x w v", {"rms_norm": 2})
def two_norms_of_one_input(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm_llama(x, w), rms_norm_llama(x, v)


@spelling("x w v", {"rms_norm": 2})
def two_torch_norms_of_one_input(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm_torch(x, w), rms_norm_torch(x, v)


@spelling("x w v", {"rms_norm": 2})
def two_norms_that_share_a_cast(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm_llama(x, w), rms_norm_larger_eps(x, v)


@spelling("x w v", {"rms_norm": 2})
def norm_of_norm(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return rms_norm_llama(rms_norm_llama(x, w), v)


@spelling("x r w v", {"rms_norm": 1, "fused_add_rms_norm": 1})
def residual_stream(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    total = r + rms_norm_llama(x, w)
    return rms_norm_llama(total, v), total


@spelling("x r w v", {"fused_add_rms_norm": 2})
def sum_with_itself_and_with_another(
    x: Tensor, r: Tensor, w: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    return rms_norm_llama(x + x, w), rms_norm_llama(x + r, v)


@spelling("x r w v", {"fused_add_rms_norm": 1, "rms_norm": 1})
def two_norms_of_one_sum(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return rms_norm_llama(total, w), rms_norm_llama(total, v)


@spelling("x w m n", {"rms_norm_dynamic_int8_quant": 1})
def norm_quantised_for_three(x: Tensor, w: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    normed = rms_norm_llama(x, w)

    def linear(weight: Tensor) -> Tensor:
        x32 = normed.float()
        scale = x32.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        return (_steps(x32, scale).float() * scale) @ weight.float()

    return linear(m), linear(n), linear(m.t())
