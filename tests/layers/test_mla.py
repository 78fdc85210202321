"""Multi-head latent attention: the formula of the paper, and decoding against prefill."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from compilepass.config import CompilationConfig, use_config
from compilepass.layers import LatentCache, MultiHeadLatentAttention
from compilepass.ops import override

BATCH, TOKENS, HIDDEN, HEADS, NOPE, ROPE, VALUE, RANK = 2, 6, 32, 4, 12, 8, 10, 16
# Outputs are near one: a few roundings to the dtype.
ATOL = {torch.float32: 2e-6, torch.bfloat16: 4e-2}

both_policies = pytest.mark.parametrize("policy", ["none", "all"])
both_queries = pytest.mark.parametrize("q_lora_rank", [None, 20])


def _layer(policy: str = "none", **changes: Any) -> MultiHeadLatentAttention:
    options = {
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "max_position": 16,
    }
    with use_config(CompilationConfig(custom_ops=policy)):
        return MultiHeadLatentAttention(HIDDEN, HEADS, **{**options, **changes})


def _input(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.arange(TOKENS).expand(BATCH, -1), torch.randn(BATCH, TOKENS, HIDDEN, dtype=dtype)


def _rotated(x: Tensor, position: int) -> Tensor:
    angle = position * 10000.0 ** -(torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
    turned = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.view_as_real(turned).flatten(-2)


def _by_the_paper(layer: Any, x: Tensor) -> Tensor:
    """Equations 9 to 19 of arXiv:2405.04434 and 41 to 47 of its appendix, token by token."""

    def norm(module: Any, c: Tensor) -> Tensor:
        return module.weight.double() * c / (c.square().mean() + module.eps).sqrt()

    def matrix(module: Any) -> Tensor:
        return module.weight.double()

    out = torch.empty(BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    for b in range(BATCH):
        keys, values = [], []
        for t in range(TOKENS):
            h = x[b, t].double()
            if isinstance(layer.q, torch.nn.Linear):
                q = matrix(layer.q) @ h
            else:
                q = matrix(layer.q.b) @ norm(layer.q.norm, matrix(layer.q.a) @ h)
            q = q.view(HEADS, NOPE + ROPE)
            compressed = matrix(layer.kv_a) @ h
            kv = matrix(layer.kv_b) @ norm(layer.kv_norm, compressed[:RANK])
            kv = kv.view(HEADS, NOPE + VALUE)
            shared = _rotated(compressed[RANK:], t).expand(HEADS, ROPE)
            keys.append(torch.cat((kv[:, :NOPE], shared), -1))
            values.append(kv[:, NOPE:])
            query = torch.cat((q[:, :NOPE], _rotated(q[:, NOPE:], t)), -1)
            scores = torch.einsum("hd,shd->hs", query, torch.stack(keys)) / (NOPE + ROPE) ** 0.5
            heads = torch.einsum("hs,shd->hd", scores.softmax(-1), torch.stack(values))
            out[b, t] = matrix(layer.out) @ heads.flatten()
    return out


@both_policies
@both_queries
@torch.no_grad()
def test_it_computes_the_formula_of_the_paper(policy: str, q_lora_rank: int | None) -> None:
    layer = _layer(policy, q_lora_rank=q_lora_rank)
    positions, x = _input()
    out, cache = layer(positions, x)
    assert cache.latent.shape == (BATCH, TOKENS, RANK)
    assert cache.rope_key.shape == (BATCH, TOKENS, ROPE)
    torch.testing.assert_close(out.double(), _by_the_paper(layer, x), rtol=0, atol=2e-6)


@both_policies
@both_queries
@pytest.mark.parametrize("dtype", ATOL, ids=str)
@torch.no_grad()
def test_decoding_a_token_equals_its_row_of_the_prefill(
    policy: str, q_lora_rank: int | None, dtype: torch.dtype
) -> None:
    layer = _layer(policy, q_lora_rank=q_lora_rank, dtype=dtype)
    positions, x = _input(dtype)
    wanted, whole = layer(positions, x)
    cache: LatentCache | None = None
    for t in range(TOKENS):
        row, cache = layer(positions[:, t : t + 1], x[:, t : t + 1], cache)
        torch.testing.assert_close(row[:, 0], wanted[:, t], rtol=0, atol=ATOL[dtype])
    assert cache is not None
    torch.testing.assert_close(cache.latent, whole.latent, rtol=0, atol=ATOL[dtype])
    torch.testing.assert_close(cache.rope_key, whole.rope_key, rtol=0, atol=ATOL[dtype])


@torch.no_grad()
def test_a_prefill_in_chunks_equals_one_prefill() -> None:
    layer, (positions, x) = _layer(), _input()
    wanted, _ = layer(positions, x)
    first, cache = layer(positions[:, :2], x[:, :2])
    second, _ = layer(positions[:, 2:], x[:, 2:], cache)
    torch.testing.assert_close(torch.cat((first, second), 1), wanted, rtol=0, atol=2e-6)


@torch.no_grad()
def test_a_cache_is_left_as_it_is_by_a_further_token() -> None:
    layer, (positions, x) = _layer(), _input()
    _, cache = layer(positions[:, :2], x[:, :2])
    latent = cache.latent.clone()
    _, longer = layer(positions[:, 2:3], x[:, 2:3], cache)
    assert longer.latent.shape[1] == 3
    assert torch.equal(cache.latent, latent)


def test_the_policy_applies_to_the_ops_inside() -> None:
    config = CompilationConfig(custom_ops=["none", "+rms_norm"])
    with use_config(config):
        layer = _layer("none,+rms_norm", q_lora_rank=20)
    assert layer.kv_norm.decision.method == "forward_cpu"
    assert layer.q.norm.decision.method == "forward_cpu"
    assert layer.rotary.decision.method == "forward_native"


@torch.no_grad()
def test_copies_and_state_carry_the_weights() -> None:
    layer, other, (positions, x) = _layer(), _layer(), _input()
    other.load_state_dict(layer.state_dict())
    wanted = layer(positions, x)[0]
    for same in (copy.deepcopy(layer), other):
        torch.testing.assert_close(same(positions, x)[0], wanted, rtol=0, atol=0)


def test_a_replacement_is_built_in_its_place() -> None:
    class Absorbed(MultiHeadLatentAttention):
        pass

    with override(MultiHeadLatentAttention, Absorbed):
        assert type(_layer()) is Absorbed


@both_policies
@torch.no_grad()
def test_prefill_and_decoding_compile_with_dynamic_sizes(policy: str) -> None:
    layer, (positions, x) = _layer(policy), _input()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    cache = compiled_cache = None
    for start, end in ((0, 3), (3, 5), (5, 6)):
        part = positions[:, start:end], x[:, start:end]
        wanted, cache = layer(*part, cache)
        found, compiled_cache = compiled(*part, compiled_cache)
        torch.testing.assert_close(found, wanted)
