"""Each wrong input is refused with the op's name and what to give instead, on both paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compilepass.errors import OpValueError
from compilepass.layers import (
    FatreluAndMul,
    GeluAndMul,
    GemmaRMSNorm,
    Int8Linear,
    LayerNorm,
    MRotaryEmbedding,
    MulAndSilu,
    MultiHeadLatentAttention,
    QKNormRope,
    QuantInt8,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
    SwigluOAIAndMul,
)

from .cases import under


def _latent_attention() -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(
        16,
        2,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        max_position=8,
    )


def _rotary() -> RotaryEmbedding:
    return RotaryEmbedding(8, 32)


def _sections() -> MRotaryEmbedding:
    return MRotaryEmbedding(8, 32, (1, 3))


WRONG_CALLS: dict[str, tuple[Callable[[], Any], tuple[tuple[int, ...], ...], str]] = {
    "norm of another width": (lambda: RMSNorm(16), ((3, 15),), "RMSNorm(16) got x"),
    "norm of width one": (lambda: RMSNorm(16), ((3, 1),), "[..., 16]"),
    "norm of a scalar": (lambda: RMSNorm(16), ((),), "RMSNorm(16) got x"),
    "residual that broadcasts": (lambda: RMSNorm(16), ((3, 16), (1, 16)), "residual of the shape"),
    "odd silu": (SiluAndMul, ((3, 7),), "SiluAndMul got x"),
    "silu of one element": (SiluAndMul, ((3, 1),), "2 * I"),
    "odd gelu": (GeluAndMul, ((3, 7),), "GeluAndMul got x"),
    "gelu of a scalar": (GeluAndMul, ((),), "GeluAndMul got x"),
    "layer norm of another width": (lambda: LayerNorm(16), ((3, 15),), "LayerNorm(16) got x"),
    "layer norm's residual": (lambda: LayerNorm(16), ((3, 16), (16,)), "residual of the shape"),
    "gemma norm of another width": (
        lambda: GemmaRMSNorm(16),
        ((3, 15),),
        "GemmaRMSNorm(16) got x",
    ),
    "odd mul and silu": (MulAndSilu, ((3, 7),), "MulAndSilu got x"),
    "odd fatrelu": (FatreluAndMul, ((3, 7),), "FatreluAndMul got x"),
    "odd neighbours": (SwigluOAIAndMul, ((3, 7),), "SwigluOAIAndMul got x"),
    "one position of two": (_sections, ((3,), (3, 2, 8), (3, 1, 8)), "positions [2, ...]"),
    "positions for other tokens": (
        _sections,
        ((2, 4), (3, 2, 8), (3, 1, 8)),
        "MRotaryEmbedding got q",
    ),
    "narrow heads to norm": (
        lambda: QKNormRope(8, 32),
        ((3,), (3, 2, 8), (3, 1, 6)),
        "QKNormRope got k",
    ),
    "rows of nothing": (QuantInt8, ((3, 0),), "H > 0"),
    "scalar to quantise": (QuantInt8, ((),), "QuantInt8 got x"),
    "linear of another width": (lambda: Int8Linear(8, 4), ((3, 4),), "Int8Linear(8, 4) got x"),
    "narrow heads": (_rotary, ((3,), (3, 2, 8), (3, 1, 6)), "got k of the shape (3, 1, 6)"),
    "heads flattened": (_rotary, ((3,), (3, 16), (3, 16)), "got q of the shape (3, 16)"),
    "too few positions": (_rotary, ((1,), (3, 2, 8), (3, 1, 8)), "positions of the shape (1,)"),
    "attention without batch": (_latent_attention, ((3,), (3, 16)), "B, T"),
    "attention of another width": (_latent_attention, ((1, 3), (1, 3, 8)), "[B, T, 16]"),
}


@pytest.mark.parametrize("policy", ["none", "all"])
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_shape_is_refused(name: str, policy: str) -> None:
    build, shapes, said = WRONG_CALLS[name]
    op = under(policy, build)
    with pytest.raises(OpValueError) as caught:
        op(*(torch.zeros(shape) for shape in shapes))
    assert said in str(caught.value)


@pytest.mark.parametrize("rotary_dim", [0, 3, 10])
def test_a_rotary_dim_that_is_not_pairs_of_the_head_is_refused(rotary_dim: int) -> None:
    with pytest.raises(OpValueError, match=f"cannot rotate {rotary_dim} elements of a head of 8"):
        RotaryEmbedding(8, 32, rotary_dim=rotary_dim)


def test_an_unknown_gelu_is_refused_with_the_nearest() -> None:
    with pytest.raises(OpValueError, match="Did you mean 'tanh'"):
        GeluAndMul("tahn")


def test_sections_that_are_not_the_pairs_of_a_head_are_refused() -> None:
    for sections in ((1, 2), (4, 0), (5, -1)):
        with pytest.raises(OpValueError, match="4 in total"):
            MRotaryEmbedding(8, 32, sections)


def test_an_unknown_variant_is_refused_with_the_nearest() -> None:
    with pytest.raises(OpValueError, match="Did you mean 'gemma'"):
        QKNormRope(8, 32, variant="gema")


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_limit_that_leaves_nothing_is_refused(limit: float) -> None:
    with pytest.raises(OpValueError, match="at least 0"):
        SwigluOAIAndMul(limit=limit)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="enforce_enabled"):
        SiluAndMul(enforce_enabled=True)
