"""A rule that is given twice, by two passes, rewrites each of its sites once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import compilepass as cp
from compilepass.kernels import native

from .one_rule import compile_with_rules
from .spellings import rms_norm_llama


def rule() -> cp.Rule:
    def norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return native.rms_norm(x, w, eps)

    def fused(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return torch.ops.compilepass.rms_norm(x, w, eps)  # type: ignore[no-any-return]

    return cp.Rule(norm, fused, {"x": ("T", "H"), "w": ("H",)})


@pytest.mark.parametrize("same", [True, False])
def test_the_second_of_two_equal_rules_finds_everything_done(same: bool) -> None:
    first = rule()
    model = compile_with_rules(rms_norm_llama, first, first if same else rule())
    model(torch.randn(5, 16), torch.randn(16))
    (graph,) = cp.report(model).graphs
    counts = [len(r.sites) for p in graph.passes for r in p.rules]
    assert counts == [1, 0]
