"""``merge_linears`` multiplies once by weights that lie side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import compilepass as cp
from compilepass.comparison import compare
from compilepass.testing import graph_of

PASS = "merge_linears"
ONLY = cp.CompilationConfig(
    backend="fx", passes=["none", "+eliminate_common_subexpressions", f"+{PASS}"]
)
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = {"rows": (5, 32), "batch": (2, 3, 32), "token": (1, 1, 32)}


class Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 32, bias)
        self.k_proj, self.v_proj = nn.Linear(32, 16, bias), nn.Linear(32, 16, bias)

    def forward(self, x: Tensor) -> Any:
        x = x.unsqueeze(0) if x.dim() == 2 else x
        q, k, v = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out.transpose(1, 2).reshape(x.shape), k

    @staticmethod
    def _heads(x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, 8).transpose(1, 2)


class Gate(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48, bias), nn.Linear(32, 48, bias)

    def forward(self, x: Tensor) -> Any:
        up = self.up_proj(x)
        return F.silu(self.gate_proj(x)) * up, up


def packed(make: Callable[[bool], nn.Module], bias: bool, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = make(bias).to(dtype).eval().requires_grad_(False)
    assert len(cp.merge_linears_(model).groups) == 1
    return model


def products(model: Callable[..., Any], *args: Tensor) -> Counter[str]:
    graph = graph_of(model, args, ONLY).graph
    names = (str(n.target) for n in graph.nodes if n.op == "call_function")
    return Counter(n.split(".")[1] for n in names if "mm" in n)


def changes(fast: Any) -> int:
    record = next(p for p in cp.report(fast).passes if p.name == PASS)
    assert record.status == "ran", record
    return record.changes


def layouts(value: Any) -> list[Any]:
    return [
        (t.shape, [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1])
        for t in tree_leaves(value)
    ]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("make", [Attention, Gate])
def test_projections_of_one_input_are_one_product(
    make: Any, bias: bool, dtype: torch.dtype, shape: str, dynamic: bool | None
) -> None:
    model = packed(make, bias, dtype)
    x = torch.randn(SHAPES[shape]).to(dtype)
    with torch.no_grad():
        fast = cp.compile(model, ONLY.model_copy(update={"dynamic": dynamic}))
        found, wanted = fast(x), model(x)
    assert changes(fast) == 1
    assert layouts(found) == layouts(wanted)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert products(model, x).total() == 1


@pytest.mark.parametrize("make", [Attention, Gate])
def test_errors_do_not_grow(make: Any) -> None:
    model = packed(make, True, torch.bfloat16)
    compared = compare(model, (torch.randn(2, 3, 32).bfloat16(),), ONLY)
    assert compared.ok(), compared.explain()


def test_a_model_of_transformers_has_four_products_a_layer_and_one_for_the_head() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    tokens = torch.arange(12).view(2, 6)

    def logits(tokens: Tensor) -> Tensor:
        return model(tokens).logits  # type: ignore[no-any-return]

    with torch.no_grad():
        wanted = logits(tokens)
        cp.merge_linears_(model)
        torch.testing.assert_close(logits(tokens), wanted)
        fast = cp.compile(
            logits, cp.CompilationConfig(backend="fx", passes=["default", f"+{PASS}"])
        )
        found = fast(tokens)
    assert changes(fast) == 4
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    every = cp.CompilationConfig(backend="fx", passes=["default", f"+{PASS}"])
    called = [str(n.target) for n in graph_of(logits, (tokens,), every).graph.nodes]
    assert sum(name in ("aten.mm.default", "aten.addmm.default") for name in called) == 2 * 4 + 1


W, B, X = torch.randn(48, 32), torch.randn(48), torch.randn(5, 32)


def chunks(x: Tensor) -> Any:
    first, second, third = W.chunk(3)
    return F.linear(x, first), F.linear(x, third), F.linear(x, second)


def not_the_whole(x: Tensor) -> Any:
    return F.linear(x, W[8:16]).sin(), F.linear(x, W[16:32]).cos()


def one_aside(x: Tensor) -> Any:
    return F.linear(x, W[:8]), F.linear(x, W[8:16]), F.linear(x, W[24:])


@pytest.mark.parametrize(("fn", "left"), [(chunks, 1), (not_the_whole, 1), (one_aside, 2)])
def test_slices_that_a_model_cuts_itself_are_merged(fn: Callable[..., Any], left: int) -> None:
    with torch.no_grad():
        fast = cp.compile(fn, ONLY)
        torch.testing.assert_close(fast(X), fn(X), rtol=1e-5, atol=1e-5)
    assert changes(fast) == 1
    assert products(fn, X).total() == left


def other_input(x: Tensor) -> Any:
    return F.linear(x, W[:16]), F.linear(x.sin(), W[16:])


def gap(x: Tensor) -> Any:
    return F.linear(x, W[:16]), F.linear(x, W[17:])


def overlap(x: Tensor) -> Any:
    return F.linear(x, W[:16]), F.linear(x, W[15:])


def along_the_sum(x: Tensor) -> Any:
    return x[:, :16] @ W[:, :16].t(), x[:, :16] @ W[:, 16:].t()


def not_transposed(x: Tensor) -> Any:
    return x @ W[:32], x[:, :16] @ W[32:]


def bias_and_none(x: Tensor) -> Any:
    return F.linear(x, W[:16], B[:16]), F.linear(x, W[16:])


def bias_that_needs_the_other(x: Tensor) -> Any:
    first = F.linear(x, W[:16], B[:16])
    return first, F.linear(x, W[16:], B[16:] + first.sum())


def separate_weights(x: Tensor) -> Any:
    return F.linear(x, W), F.linear(x, W + 1)


@pytest.mark.parametrize(
    "fn",
    [
        other_input,
        gap,
        overlap,
        along_the_sum,
        not_transposed,
        bias_and_none,
        bias_that_needs_the_other,
        separate_weights,
    ],
    ids=lambda fn: fn.__name__,
)
def test_what_is_nearly_that_is_left_alone(fn: Callable[..., Any]) -> None:
    with torch.no_grad():
        fast = cp.compile(fn, ONLY)
        torch.testing.assert_close(fast(X), fn(X))
    assert changes(fast) == 0


def test_a_weight_that_is_written_to_is_read_anew() -> None:
    model = packed(Gate, False, torch.float32)
    fast = cp.compile(model, ONLY)
    with torch.no_grad():
        before = fast(X)
        model.up_proj.weight.mul_(2)  # type: ignore[operator, union-attr]
        after = fast(X)
    torch.testing.assert_close(after[1], 2 * before[1])
