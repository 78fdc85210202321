"""Every op that ships, with inputs for it and what it computes in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compilepass.config import CompilationConfig, use_config
from compilepass.layers import (
    FastGELU,
    FatreluAndMul,
    GeluAndMul,
    GemmaRMSNorm,
    Int8Linear,
    LayerNorm,
    Llama3Scaling,
    MRotaryEmbedding,
    MulAndSilu,
    NewGELU,
    QKNormRope,
    QuantInt8,
    QuickGELU,
    ReLUSquaredActivation,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
    SwigluOAIAndMul,
    YarnScaling,
)

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 3, 1, 8, 5

# A few roundings to the dtype, relative to the result.
FP64_RTOL = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2}
FP64_ATOL = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """``build()`` makes the op, ``inputs()`` its fp32 arguments, ``oracle(op, *args)`` is fp64."""

    build: Callable[[], Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    oracle: Callable[..., Tensor | tuple[Tensor, ...]]
    stacked: frozenset[int] = frozenset()
    """Arguments whose first dim is not of tokens."""

    def per_token(
        self, args: tuple[Tensor, ...], change: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, ...]:
        """``change`` of each argument, as a tensor whose first dim is of tokens."""
        return tuple(
            torch.stack([change(part) for part in a]) if i in self.stacked else change(a)
            for i, a in enumerate(args)
        )


def under(policy: str, build: Callable[[], Any]) -> Any:
    with use_config(CompilationConfig(custom_ops=policy)):
        return build()


def outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def cast(args: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The floating arguments in another dtype; positions stay integers."""
    return tuple(a.to(dtype) if a.is_floating_point() else a for a in args)


def _norm() -> RMSNorm:
    norm = RMSNorm(16, eps=1e-5)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


def _norm_oracle(op: Any, x: Tensor) -> Tensor:
    return op.weight.double() * x / (x.square().mean(-1, keepdim=True) + op.eps).sqrt()


def _gemma_norm() -> GemmaRMSNorm:
    norm = GemmaRMSNorm(16, eps=1e-5)
    nn.init.uniform_(norm.weight, -0.5, 0.5)
    return norm


def _gemma_oracle(op: Any, x: Tensor) -> Tensor:
    return (1 + op.weight.double()) * x / (x.square().mean(-1, keepdim=True) + op.eps).sqrt()


def _layer_norm() -> LayerNorm:
    norm = LayerNorm(16)
    assert norm.weight is not None and norm.bias is not None
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    return norm


def _layer_norm_oracle(op: Any, x: Tensor) -> Tensor:
    parameters = (None if p is None else p.double() for p in (op.weight, op.bias))
    return F.layer_norm(x, (16,), *parameters, op.eps)


def _swigluoai_oracle(op: Any, x: Tensor) -> Tensor:
    gate, value = x.unflatten(-1, (-1, 2)).unbind(-1)
    gate, value = gate.clamp(max=op.limit), value.clamp(-op.limit, op.limit)
    return (value + 1) * gate * torch.sigmoid(op.alpha * gate)


def _gate_oracle(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def oracle(_: Any, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return activation(gate) * value

    return oracle


def _rotary_inputs() -> tuple[Tensor, ...]:
    positions = torch.tensor([0, 1, 2, 30, 31])
    return (
        positions,
        torch.randn(TOKENS, HEADS, HEAD_DIM),
        torch.randn(TOKENS, KV_HEADS, HEAD_DIM),
    )


def _frequencies(base: float, width: int) -> Tensor:
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    return base**-exponent


def _llama3_frequencies() -> Tensor:
    """As the reference code of Llama 3.1: one frequency after the other, by its wavelength."""
    scaled = []
    for frequency in _frequencies(500.0, HEAD_DIM).tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4:
            scaled.append(frequency)
        elif wavelength > 64 / 1:
            scaled.append(frequency / 8)
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            scaled.append((1 - smooth) * frequency / 8 + smooth * frequency)
    return torch.tensor(scaled, dtype=torch.float64)


def _yarn_frequencies() -> Tensor:
    """As in the paper: by the turns of each pair in the original context of 64."""
    plain = _frequencies(1e4, HEAD_DIM)
    ends = [4 * math.log(64 / (turns * 2 * math.pi)) / math.log(1e4) for turns in (8, 1)]
    ramp = ((torch.arange(4) - ends[0]) / (ends[1] - ends[0])).clamp(0, 1)
    return plain / 4 * ramp + plain * (1 - ramp)


def _turned(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """Pairs of elements as complex numbers, turned; what has no angle stays."""
    width = 2 * angle.shape[-1]
    turn = torch.polar(torch.ones_like(angle), angle)[:, None, :]
    head, rest = x[..., :width], x[..., width:]
    pairs = head.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    dim = -1 if interleaved else -2
    turned = torch.complex(pairs.select(dim, 0), pairs.select(dim, 1)) * turn
    return torch.cat((torch.stack((turned.real, turned.imag), dim).flatten(-2), rest), -1)


def _rotary_oracle(
    frequencies: Tensor, interleaved: bool = False, amplitude: float = 1.0
) -> Callable[..., tuple[Tensor, Tensor]]:
    def oracle(_: Any, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.double()[:, None] * frequencies
        return (
            _turned(q, angle, interleaved) * amplitude,
            _turned(k, angle, interleaved) * amplitude,
        )

    return oracle


def _sections_oracle(section: list[int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """``section``: by which of its positions each pair of a token turns."""

    def oracle(_: Any, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.double()[section].t() * _frequencies(1e4, HEAD_DIM)
        return _turned(q, angle, False), _turned(k, angle, False)

    return oracle


def _sections_inputs() -> tuple[Tensor, ...]:
    _, q, k = _rotary_inputs()
    return torch.randint(0, 32, (2, TOKENS)), q, k


def _qk_norm_rope(variant: str = "llama") -> QKNormRope:
    op = QKNormRope(HEAD_DIM, 32, variant=variant)
    for weight in (op.q_weight, op.k_weight):
        nn.init.uniform_(weight, 0.5, 1.5)
    return op


def _qk_norm_rope_oracle(op: Any, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    offset = 1 if op.variant == "gemma" else 0
    normed = [
        (offset + weight.double()) * x / (x.square().mean(-1, keepdim=True) + op.eps).sqrt()
        for x, weight in ((q, op.q_weight), (k, op.k_weight))
    ]
    return _rotary_oracle(_frequencies(1e4, HEAD_DIM))(op, positions, *normed)


def _int8_linear() -> Int8Linear:
    return Int8Linear.from_linear(nn.Linear(32, 12))


def _int8_linear_oracle(op: Any, x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    weight = op.weight.double() * op.weight_scale.double()[:, None]
    return F.linear((x / scale).round() * scale, weight, op.bias.double())


def _gated_input() -> tuple[Tensor, ...]:
    return (torch.randn(TOKENS, 2 * 12) * 3,)


CASES = {
    "rms_norm": Case(_norm, lambda: (torch.randn(TOKENS, 16) * 3,), _norm_oracle),
    "rms_norm/residual": Case(
        _norm,
        lambda: (torch.randn(TOKENS, 16), torch.randn(TOKENS, 16)),
        lambda op, x, residual: (_norm_oracle(op, x + residual), x + residual),
    ),
    "gemma_rms_norm": Case(_gemma_norm, lambda: (torch.randn(TOKENS, 16) * 3,), _gemma_oracle),
    "gemma_rms_norm/residual": Case(
        _gemma_norm,
        lambda: (torch.randn(TOKENS, 16), torch.randn(TOKENS, 16)),
        lambda op, x, residual: (_gemma_oracle(op, x + residual), x + residual),
    ),
    "layer_norm": Case(_layer_norm, lambda: (torch.randn(TOKENS, 16) * 3,), _layer_norm_oracle),
    "layer_norm/residual": Case(
        _layer_norm,
        lambda: (torch.randn(TOKENS, 16), torch.randn(TOKENS, 16)),
        lambda op, x, residual: (_layer_norm_oracle(op, x + residual), x + residual),
    ),
    "layer_norm/without bias": Case(
        lambda: LayerNorm(16, bias=False),
        lambda: (torch.randn(TOKENS, 16) * 3,),
        _layer_norm_oracle,
    ),
    "layer_norm/without parameters": Case(
        lambda: LayerNorm(16, elementwise_affine=False),
        lambda: (torch.randn(TOKENS, 16) * 3,),
        _layer_norm_oracle,
    ),
    "silu_and_mul": Case(SiluAndMul, _gated_input, _gate_oracle(F.silu)),
    "gelu_and_mul": Case(GeluAndMul, _gated_input, _gate_oracle(F.gelu)),
    "gelu_and_mul/tanh": Case(
        lambda: GeluAndMul("tanh"),
        _gated_input,
        _gate_oracle(lambda x: F.gelu(x, approximate="tanh")),
    ),
    "mul_and_silu": Case(MulAndSilu, _gated_input, lambda _, x: x[..., :12] * F.silu(x[..., 12:])),
    "fatrelu_and_mul": Case(
        lambda: FatreluAndMul(0.5),
        _gated_input,
        _gate_oracle(lambda gate: torch.where(gate > 0.5, gate, 0)),
    ),
    "swigluoai_and_mul": Case(SwigluOAIAndMul, _gated_input, _swigluoai_oracle),
    "swigluoai_and_mul/limited": Case(
        lambda: SwigluOAIAndMul(1.0, 2.0), _gated_input, _swigluoai_oracle
    ),
    "gelu_new": Case(NewGELU, _gated_input, lambda _, x: F.gelu(x, approximate="tanh")),
    "gelu_fast": Case(FastGELU, _gated_input, lambda _, x: F.gelu(x, approximate="tanh")),
    "quick_gelu": Case(QuickGELU, _gated_input, lambda _, x: x * torch.sigmoid(1.702 * x)),
    "relu2": Case(ReLUSquaredActivation, _gated_input, lambda _, x: x.clamp(min=0).square()),
    "rotary_embedding": Case(
        lambda: RotaryEmbedding(HEAD_DIM, 32),
        _rotary_inputs,
        _rotary_oracle(_frequencies(1e4, HEAD_DIM)),
    ),
    "rotary_embedding/partial": Case(
        lambda: RotaryEmbedding(HEAD_DIM, 32, 500.0, rotary_dim=4),
        _rotary_inputs,
        _rotary_oracle(_frequencies(500.0, 4)),
    ),
    "rotary_embedding/interleaved": Case(
        lambda: RotaryEmbedding(HEAD_DIM, 32, rotary_dim=6, interleaved=True),
        _rotary_inputs,
        _rotary_oracle(_frequencies(1e4, 6), interleaved=True),
    ),
    "rotary_embedding/llama3": Case(
        lambda: RotaryEmbedding(
            HEAD_DIM, 32, 500.0, scaling=Llama3Scaling(original_max_position=64)
        ),
        _rotary_inputs,
        _rotary_oracle(_llama3_frequencies()),
    ),
    "rotary_embedding/yarn": Case(
        lambda: RotaryEmbedding(
            HEAD_DIM, 32, scaling=YarnScaling(4.0, 64, beta_fast=8, truncate=False)
        ),
        _rotary_inputs,
        _rotary_oracle(_yarn_frequencies(), amplitude=0.1 * math.log(4) + 1),
    ),
    "mrotary_embedding": Case(
        lambda: MRotaryEmbedding(HEAD_DIM, 32, (1, 3)),
        _sections_inputs,
        _sections_oracle([0, 1, 1, 1]),
        stacked=frozenset({0}),
    ),
    "mrotary_embedding/interleaved": Case(
        lambda: MRotaryEmbedding(HEAD_DIM, 32, (3, 1), sections_interleaved=True),
        _sections_inputs,
        _sections_oracle([0, 1, 0, 0]),
        stacked=frozenset({0}),
    ),
    "qk_norm_rope": Case(_qk_norm_rope, _rotary_inputs, _qk_norm_rope_oracle),
    "qk_norm_rope/gemma": Case(
        lambda: _qk_norm_rope("gemma"), _rotary_inputs, _qk_norm_rope_oracle
    ),
    "quant_int8": Case(
        QuantInt8,
        lambda: (torch.randn(TOKENS, 16),),
        lambda _, x: (
            (x * 127 / x.abs().amax(-1, keepdim=True)).round(),
            x.abs().amax(-1, keepdim=True) / 127,
        ),
    ),
    "int8_linear": Case(_int8_linear, lambda: (torch.randn(TOKENS, 32),), _int8_linear_oracle),
}
