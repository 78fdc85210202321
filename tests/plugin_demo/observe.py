"""Print as JSON what the installed plugin does in this process; run by test_plugin_demo.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import compilepass as cp
from compilepass.kernels import find
from compilepass.layers import MultiHeadLatentAttention, RMSNorm, SiluAndMul
from compilepass.platforms import current_platform
from compilepass.plugins import broken_plugins

ALL = cp.CompilationConfig(custom_ops="all", backend="fx", expect={"fuse_quick_gelu": 1})
NONE = cp.CompilationConfig(custom_ops="none")


def ran(call: Callable[[], Any]) -> list[str]:
    """The norm ops that a call runs, however deep inside of another."""
    with torch.profiler.profile() as profile:
        call()
    return sorted({e.key for e in profile.key_averages() if e.key.endswith("::rms_norm")})


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def platforms() -> dict[str, Any]:
    with cp.use_platform("demo"), cp.use_config(ALL):
        chosen = SiluAndMul().decision
    return {"detected": current_platform().name, "chosen": [chosen.platform, chosen.method]}


def ops() -> dict[str, Any]:
    x = torch.randn(3, 16)
    with cp.use_config(ALL):
        norm = RMSNorm(16)
    with cp.use_config(NONE):
        native = RMSNorm(16)
    return {
        "built": type(norm).__name__,
        "methods": [norm.decision.method, native.decision.method],
        "ran": ran(lambda: norm(x)),
        "distance": distance(norm(x), native(x)),
    }


def latent_attention() -> MultiHeadLatentAttention:
    torch.manual_seed(0)
    return MultiHeadLatentAttention(
        32,
        4,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        max_position=8,
    )


@torch.no_grad()
def layers() -> dict[str, Any]:
    layer = latent_attention()
    with cp.override(MultiHeadLatentAttention, MultiHeadLatentAttention):
        in_tree = latent_attention()
    positions, x = torch.arange(6).expand(2, -1), torch.randn(2, 6, 32)
    wanted, cache = in_tree(positions, x)
    distances = [distance(layer(positions, x)[0], wanted)]
    for first, last in ((5, 6), (3, 6)):
        cache = in_tree(positions[:, :first], x[:, :first])[1]
        rows = layer(positions[:, first:last], x[:, first:last], cache)[0]
        distances.append(distance(rows, wanted[:, first:last]))
    built = [type(layer).__name__, type(in_tree).__name__]
    return {"built": built, "distance": max(distances)}


def kernels() -> dict[str, Any]:
    op = find("compilepass::rms_norm")
    assert op is not None

    def call(width: int, *, trained: bool = False) -> list[str]:
        x, weight = torch.randn(2, width), torch.ones(width, requires_grad=trained)
        return ran(lambda: torch.ops.compilepass.rms_norm(x, weight, 1e-6))

    return {
        "best": op.available("cpu").provider,
        "all": [p.name for p in op.providers if p.device_type == "cpu"],
        "even": call(16),
        "odd": call(15),
        "trained": call(16, trained=True),
    }


class Gated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x) + 1


@torch.no_grad()
def passes() -> dict[str, Any]:
    model, x = Gated(), torch.randn(4, 16)
    compiled = cp.compile(model, ALL)
    return {
        "distance": distance(compiled(x), model(x)),
        "matches": cp.report(compiled).matches["fuse_quick_gelu"],
    }


print(
    json.dumps(
        {
            "platforms": platforms(),
            "ops": ops(),
            "layers": layers(),
            "kernels": kernels(),
            "passes": passes(),
            "broken": [plugin.name for plugin in broken_plugins()],
        }
    )
)
