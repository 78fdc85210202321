"""Values whose leading dimensions lie in another order in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compilepass.kernels import native
from compilepass.rewrite import Rule
from compilepass.rewrite.memory_order import MemoryOrder

from .capture import compiled
from .one_rule import apply

HEADS, DIM = 4, 16


def norm_of_heads(x: Tensor, w: Tensor) -> Tensor:
    heads = (x * 2).view(*x.shape[:-1], HEADS, DIM).transpose(-3, -2)
    return native.rms_norm(heads, w, 1e-6)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", [(5,), (2, 5), (3, 2, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_of_transposed_heads_fuses_and_keeps_its_strides(
    dtype: torch.dtype, shape: tuple[int, ...], dynamic: bool
) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(*shape, HEADS * DIM).to(dtype), torch.randn(DIM).to(dtype)
    torch._dynamo.mark_static(x, x.dim() - 1)
    done = compiled(norm_of_heads, (x, w), dynamic=dynamic)
    assert done.kernels == {"rms_norm": 1}
    assert done.changes_again == 0
    assert not done.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    wanted = norm_of_heads(x, w)
    assert done.result.stride() == wanted.stride()
    torch.testing.assert_close(done.result, wanted, rtol=2e-2, atol=2e-2)


def test_two_inputs_in_one_order() -> None:
    def model(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return native.fused_add_rms_norm(x.transpose(0, 1), r.transpose(0, 1), w, 1e-6)

    x, r, w = torch.randn(3, 5, DIM), torch.randn(3, 5, DIM), torch.randn(DIM)
    done = compiled(model, (x, r, w))
    assert done.kernels == {"fused_add_rms_norm": 1}
    for mine, theirs in zip(done.result, model(x, r, w), strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs)


def share(x: Tensor) -> Tensor:
    return torch.relu(x) / torch.relu(x).sum()


def share_row_major(x: Tensor) -> Tensor:
    return (torch.relu(x) / torch.relu(x).sum()).contiguous()


def test_what_looks_at_all_rows_is_not_turned() -> None:
    rule = Rule(share, share_row_major, {"x": ("...", "H")})
    x = torch.randn(3, 5, DIM).transpose(0, 1) * 2
    applied = apply(share, (x,), rule)
    assert (applied.result.count, dict(applied.result.refusals)) == (0, {"layout": 1})
    assert torch.equal(applied.output, share(x))


def test_an_order_is_undone() -> None:
    order = MemoryOrder((1, 2, 0))
    x = torch.randn(2, 3, 4, 5)
    assert order.applied(x).shape == (3, 4, 2, 5)
    assert torch.equal(order.undone(order.applied(x)), x)
    assert order.applied(torch.randn(4, 5)).shape == (1, 4, 1, 5)  # missing ones broadcast
