"""Every op that ships, with inputs for it and what it computes in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compilepass.config import CompilationConfig, use_config
from compilepass.layers import (
    GeluAndMul,
    Int8Linear,
    QuantInt8,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
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


def _rotary_oracle(
    base: float, width: int, interleaved: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Pairs of elements as complex numbers, turned by ``position * base ** (-2i / width)``."""

    def oracle(_: Any, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
        angle = positions.double()[:, None] * base**-exponent
        turn = torch.polar(torch.ones_like(angle), angle)[:, None, :]

        def rotate(x: Tensor) -> Tensor:
            head, rest = x[..., :width], x[..., width:]
            pairs = head.unflatten(-1, (-1, 2) if interleaved else (2, -1))
            dim = -1 if interleaved else -2
            turned = torch.complex(pairs.select(dim, 0), pairs.select(dim, 1)) * turn
            return torch.cat((torch.stack((turned.real, turned.imag), dim).flatten(-2), rest), -1)

        return rotate(q), rotate(k)

    return oracle


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
    "silu_and_mul": Case(SiluAndMul, _gated_input, _gate_oracle(F.silu)),
    "gelu_and_mul": Case(GeluAndMul, _gated_input, _gate_oracle(F.gelu)),
    "gelu_and_mul/tanh": Case(
        lambda: GeluAndMul("tanh"),
        _gated_input,
        _gate_oracle(lambda x: F.gelu(x, approximate="tanh")),
    ),
    "rotary_embedding": Case(
        lambda: RotaryEmbedding(HEAD_DIM, 32), _rotary_inputs, _rotary_oracle(1e4, HEAD_DIM, False)
    ),
    "rotary_embedding/partial": Case(
        lambda: RotaryEmbedding(HEAD_DIM, 32, 500.0, rotary_dim=4),
        _rotary_inputs,
        _rotary_oracle(500.0, 4, False),
    ),
    "rotary_embedding/interleaved": Case(
        lambda: RotaryEmbedding(HEAD_DIM, 32, rotary_dim=6, interleaved=True),
        _rotary_inputs,
        _rotary_oracle(1e4, 6, True),
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
