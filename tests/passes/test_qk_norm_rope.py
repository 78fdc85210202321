"""``fuse_qk_norm_rope`` takes norms with the rotations that follow, in any order of the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import compilepass as cp
from compilepass.models import Target, build
from compilepass.testing import expect_matches

HEADS, WIDTH, TURNED, EPS = 3, 16, 8, 1e-6
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-2}

Norm = Callable[[Tensor, Tensor], Tensor]
#: queries of a layer: ``(norm, x, weight, cos, sin)``; x is ``[B, S, heads * D]``
Layer = Callable[[Norm, Tensor, Tensor, Tensor, Tensor], Any]


def scaled(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def llama(x: Tensor, weight: Tensor) -> Tensor:
    return weight * scaled(x).to(x.dtype)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    return (scaled(x) * (1.0 + weight.float())).to(x.dtype)


def in_float(x: Tensor, weight: Tensor) -> Tensor:
    return (scaled(x) * weight.float()).to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def rotate_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), -1)


def heads_of(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, WIDTH)


def normed_then_transposed(norm: Norm, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Qwen3."""
    q = norm(heads_of(x), w).transpose(1, 2)
    return rotate(q, cos.unsqueeze(1), sin.unsqueeze(1))


def transposed_then_normed(norm: Norm, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gemma 3, Exaone 4."""
    q = norm(heads_of(x).transpose(1, 2), w)
    return rotate(q, cos.unsqueeze(1), sin.unsqueeze(1))


def rotated_then_transposed(norm: Norm, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gemma 4."""
    q = norm(heads_of(x), w)
    return rotate(q, cos.unsqueeze(2), sin.unsqueeze(2)).transpose(1, 2)


def a_part_transposed(norm: Norm, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """GLM 4.5, Qwen3-Next."""
    q = norm(heads_of(x), w).transpose(1, 2)
    return rotate_part(q, cos[..., :TURNED].unsqueeze(1), sin[..., :TURNED].unsqueeze(1))


def a_part(norm: Norm, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = norm(heads_of(x).transpose(1, 2), w)
    return rotate_part(q, cos[..., :TURNED].unsqueeze(1), sin[..., :TURNED].unsqueeze(1))


LAYERS: list[tuple[Layer, Norm]] = [
    (normed_then_transposed, llama),
    *((transposed_then_normed, norm) for norm in (llama, gemma, in_float)),
    *((rotated_then_transposed, norm) for norm in (llama, gemma, in_float)),
    (a_part_transposed, llama),
    (a_part, llama),
]


def inputs(dtype: torch.dtype, batch: int = 2, tokens: int = 5) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(batch, tokens, HEADS * WIDTH)
    tables = torch.randn(2, batch, tokens, WIDTH)
    tensors = [t.to(dtype) for t in (x, torch.randn(WIDTH), *tables)]
    for t in tensors:
        torch._dynamo.mark_static(t, t.dim() - 1)
    return tensors


def strides(tensor: Tensor) -> list[int]:
    """Those that mean something."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]


def check(layer: Layer, norm: Norm, args: list[Tensor], dynamic: bool | None) -> None:
    def both(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        key = x[..., : 2 * WIDTH] + 1  # fewer heads
        return layer(norm, x + 1, w, cos, sin), layer(norm, key, w * 2, cos, sin)

    with torch.no_grad():
        fast = cp.compile(both, cp.CompilationConfig(backend="fx", dynamic=dynamic))
        results = fast(*args)
        wanted = both(*args)
    expect_matches(fast, {"fuse_qk_norm_rope": 2, "fuse_rope": 0, "fuse_rms_norm": 0})
    for mine, theirs in zip(results, wanted, strict=True):
        assert strides(mine) == strides(theirs)
        tolerance = TOLERANCE[mine.dtype]
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layer", "norm"), LAYERS, ids=[f"{layer.__name__}-{norm.__name__}" for layer, norm in LAYERS]
)
def test_a_norm_and_a_rotation_become_one_kernel(
    layer: Layer, norm: Norm, dtype: torch.dtype, dynamic: bool | None
) -> None:
    check(layer, norm, inputs(dtype), dynamic)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 5), (1, 1)], ids=["token", "row", "one"])
@pytest.mark.parametrize(
    "layer", [normed_then_transposed, transposed_then_normed, a_part_transposed]
)
def test_one_token_or_one_row_is_no_exception(layer: Layer, sizes: tuple[int, int]) -> None:
    check(layer, llama, inputs(torch.bfloat16, *sizes), None)


def test_tables_without_a_batch_broadcast() -> None:
    x, w, cos, sin = inputs(torch.float32)
    check(normed_then_transposed, llama, [x, w, cos[:1], sin[:1]], True)


def normed_for_others(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = llama(heads_of(x), w).transpose(1, 2)
    return rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), q


def a_weight_for_each_head(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = llama(heads_of(x), w * torch.arange(HEADS).to(w).unsqueeze(-1)).transpose(1, 2)
    return rotate(q, cos.unsqueeze(1), sin.unsqueeze(1))


def all_heads_normed_at_once(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = heads_of(llama(x, w.repeat(HEADS))).transpose(1, 2)
    return rotate(q, cos.unsqueeze(1), sin.unsqueeze(1))


def neighbours(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = llama(heads_of(x), w).transpose(1, 2)
    turned = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    return q * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def two_norms(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q, other = (llama(heads_of(x), v).transpose(1, 2) for v in (w, w * 2))
    return q * cos.unsqueeze(1) + rotate_half(other) * sin.unsqueeze(1)


def a_table_for_each_head(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = llama(heads_of(x), w).transpose(1, 2)
    per_head = torch.arange(HEADS).to(w)[:, None, None] * cos.unsqueeze(1)
    return rotate(q, per_head, sin.unsqueeze(1))


def batch_and_heads_exchanged(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
    q = llama(heads_of(x), w).transpose(0, 2)  # [heads, S, B, D]
    return rotate(q, cos.transpose(0, 1), sin.transpose(0, 1))


#: why the pass says that it did not fire
NEAR: dict[str, tuple[Callable[..., Any], str]] = {
    fn.__name__: (fn, code)
    for fn, code in (
        (normed_for_others, "extra_user"),
        (a_weight_for_each_head, "broadcast"),
        (all_heads_normed_at_once, "shape"),
        (neighbours, "dim"),
        (two_norms, "binding"),
        (a_table_for_each_head, "broadcast"),
        (batch_and_heads_exchanged, "shape"),
    )
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NEAR)
def test_what_is_nearly_that_is_left_to_other_passes_and_told(
    name: str, dtype: torch.dtype
) -> None:
    layer, code = NEAR[name]
    args = inputs(dtype)
    with torch.no_grad():
        fast = cp.compile(layer, cp.CompilationConfig(backend="fx"))
        results, wanted = fast(*args), layer(*args)
    report = cp.report(fast)
    expect_matches(fast, {"fuse_qk_norm_rope": 0})
    assert code in {n.code for n in report.near_misses if n.pass_name == "fuse_qk_norm_rope"}
    torch.testing.assert_close(results, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


#: families, with what is set for their config, and their queries and keys that are rotated
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3": ({}, 4),
    "qwen3_moe": ({}, 4),
    "gemma3_text": ({}, 4),
    # the last of four layers attends to everything, and rotates nothing
    "exaone4": ({"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 4}, 6),
    "glm4_moe": ({"use_qk_norm": True}, 4),
}


@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [(torch.float32, True), (torch.bfloat16, None)],
    ids=["fp32-dynamic", "bf16-static"],
)
@pytest.mark.parametrize("family", MODELS)
def test_every_rotation_of_a_model_takes_its_norm_along(
    family: str, dtype: torch.dtype, dynamic: bool | None
) -> None:
    pytest.importorskip("transformers")
    settings, sites = MODELS[family]
    with torch.no_grad():
        model: Any
        model, given = build(Target(f"hf:{family}", settings, dtype))
        fast: Any = cp.compile(model, cp.CompilationConfig(backend="fx", dynamic=dynamic))
        logits, wanted = (m(**given).logits for m in (fast, model))
    expect_matches(fast, {"fuse_qk_norm_rope": sites, "fuse_rope": 0})
    torch.testing.assert_close(logits, wanted, rtol=0, atol=TOLERANCE[dtype])
