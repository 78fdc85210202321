"""Each shipped fusion: what it takes, what has nothing for it, and what it nearly takes.

All spellings of what they take are in ``tests/rewrite``; here each pass runs by its name in a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compilepass.passes import shipped_passes
from torch import Tensor

import compilepass as cp
from compilepass import FusionPass, Report

EPS = 1e-5


def rms(x: Tensor, w: Tensor, dim: int = -1) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + EPS))


def quantised(x: Tensor, bound: int = 127) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / bound
    return (x / scale).round().clamp(-bound - 1, bound).to(torch.int8), scale


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int = -1) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((sign * x[..., half:], x[..., :half]), -1) * sin


def nothing_of_it(x: Tensor) -> Tensor:
    return torch.relu(x.cumsum(0)) + 1


# -- near misses -----------------------------------------------------------------------------


def rms_of_columns(x: Tensor, w: Tensor) -> Tensor:
    return rms(x, w, dim=0)


def sum_of_another_dtype(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.double() + r
    return rms(wide.float(), w), wide


def sum_scaled(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.add(x, r, alpha=3)
    return rms(s, w), s


def standardised_without_eps(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True)) * w + b


def norm_also_returned(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = rms(x, w)
    return *quantised(y), y


def gate_also_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, -1)
    silu = F.silu(gate)
    return silu * up, silu


def gate_quantised_to_another_bound(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, -1)
    return quantised(F.silu(gate) * up, bound=63)


def turned_the_other_way(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * c + torch.cat((x[..., half:], x[..., :half]), -1) * s


def normed_and_turned_the_other_way(x: Tensor, w: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return turned_the_other_way(rms(x, w), c, s)


def product_of_rows(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor) -> Tensor:
    return (xq.float() @ wq.float().t()) * xs * ws


def product_of_rows_then_clamped(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor) -> Tensor:
    return (xq.float() @ wq.float().t()).clamp(-1e4, 1e4) * xs * ws


def widened_weight(x: Tensor, wq: Tensor, ws: Tensor) -> Tensor:
    return F.linear(x, wq.float()) * ws


def widened_weight_then_clamped(x: Tensor, wq: Tensor, ws: Tensor) -> Tensor:
    return F.linear(x, wq.float()).clamp(-1e4, 1e4) * ws


@dataclass(frozen=True)
class Fusion:
    """``taken`` holds ``count`` sites, ``missed`` none, and is told with ``code``."""

    taken: Callable[..., Any]
    missed: Callable[..., Any]
    code: str
    args: tuple[Tensor, ...]
    count: int = 1


def floats(*sizes: int | tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(len(sizes))
    return tuple(torch.randn(size, generator=generator) for size in sizes)


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


TABLE = {
    "fuse_rms_norm": Fusion(rms, rms_of_columns, "dim", floats((16, 16), 16)),
    "fuse_add_rms_norm": Fusion(
        lambda x, r, w: (rms(x + r, w), x + r),
        sum_scaled,
        "keyword",
        floats((4, 16), (4, 16), 16),
    ),
    "fuse_layer_norm": Fusion(
        lambda x, w, b: F.layer_norm(x, (16,), w, b, EPS),
        standardised_without_eps,
        "op",
        floats((4, 16), 16, 16),
    ),
    "fuse_norm_quant": Fusion(
        lambda x, w: quantised(rms(x, w)),
        norm_also_returned,
        "extra_user",
        floats((4, 16), 16),
    ),
    "fuse_act_and_mul": Fusion(
        lambda x: F.silu(x[..., :16]) * x[..., 16:],
        gate_also_returned,
        "extra_user",
        floats((4, 32)),
    ),
    "fuse_act_quant": Fusion(
        lambda x: quantised(F.silu(x[..., :16]) * x[..., 16:]),
        gate_quantised_to_another_bound,
        "literal",
        floats((4, 32)),
    ),
    "fuse_rope": Fusion(
        turned, turned_the_other_way, "op", floats((2, 3, 5, 16), (5, 16), (5, 16))
    ),
    "fuse_qk_norm_rope": Fusion(
        lambda x, w, c, s: turned(rms(x, w), c, s),
        normed_and_turned_the_other_way,
        "op",
        floats((2, 3, 5, 16), 16, (5, 16), (5, 16)),
    ),
    "fuse_linear": Fusion(
        lambda x, w, b: F.linear(x, w, b),
        lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2),
        "keyword",
        floats((1, 64), (48, 64), 48),
    ),
    "fuse_int8_linear": Fusion(
        product_of_rows,
        product_of_rows_then_clamped,
        "op",
        (int8(4, 16), torch.rand(4, 1), int8(8, 16), torch.rand(8)),
    ),
    "fuse_weight_only_linear": Fusion(
        widened_weight,
        widened_weight_then_clamped,
        "op",
        (*floats((4, 16)), int8(8, 16), torch.rand(8)),
    ),
    "fuse_fp8_linear": Fusion(
        product_of_rows,
        product_of_rows_then_clamped,
        "op",
        (fp8(4, 16), torch.rand(4, 1), fp8(8, 16), torch.rand(8)),
    ),
}

each = pytest.mark.parametrize("name", TABLE)


#: options under which small tensors are taken
OPTIONS = {"fuse_linear": "{smallest=0}"}


def explained(name: str, fn: Callable[..., Any], args: tuple[Tensor, ...]) -> Report:
    config = cp.CompilationConfig(custom_ops=["none"])
    with torch.no_grad():
        return cp.explain(fn, args, config, passes=["none", f"+{name}{OPTIONS.get(name, '')}"])


def test_each_fusion_is_in_the_table() -> None:
    fusions = [p.name for p in shipped_passes() if issubclass(p, FusionPass)]
    assert sorted(fusions) == sorted(TABLE)


@each
def test_it_takes_what_it_is_for(name: str) -> None:
    case = TABLE[name]
    report = explained(name, case.taken, case.args)
    assert report.matches[name] == case.count
    assert not report.near_misses


@each
def test_it_has_nothing_to_say_where_there_is_nothing_of_it(name: str) -> None:
    report = explained(name, nothing_of_it, floats((4, 16)))
    assert not report.matches.get(name)
    assert not report.near_misses


@each
def test_it_says_why_it_does_not_take_what_is_nearly_it(name: str) -> None:
    case = TABLE[name]
    report = explained(name, case.missed, case.args)
    assert not report.matches.get(name)
    told = {miss.code: miss for miss in report.near_misses}
    assert case.code in told
    assert told[case.code].pass_name == name
    assert "test_fusions.py" in told[case.code].source
