"""Small models, each with a known number of places that the shipped passes fuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import compilepass as cp
from compilepass.layers import RMSNorm

WIDTH = 32


class AddNorm(nn.Module):
    """One residual add and norm: one site of ``fuse_add_rms_norm``."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        normed, total = self.norm(x, residual)
        out: Tensor = self.linear(normed) + total
        return out


class Chain(nn.Module):
    """``AddNorm`` several times."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.links = nn.ModuleList(AddNorm() for _ in range(length))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        for link in self.links:
            x = link(x, residual)
        return x


class Broken(nn.Module):
    """``AddNorm`` three times, with graph breaks between them (Dynamo has none inside a loop)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = AddNorm(), AddNorm(), AddNorm()

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.first(x, residual)
        torch._dynamo.graph_break()
        x = self.second(x, residual)
        torch._dynamo.graph_break()
        out: Tensor = self.third(x, residual)
        return out


def built(make: Any, *args: Any, **kwargs: Any) -> Any:
    """A model for inference with its ops in native form, which the passes fuse."""
    with cp.use_config(cp.CompilationConfig(custom_ops=["none"])):
        return make(*args, **kwargs).eval().requires_grad_(False)


def inputs(rows: int = 4, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width)


def fx_config(**fields: Any) -> cp.CompilationConfig:
    """Without what takes linear layers on some machines only."""
    fields.setdefault("passes", ["default", "-fuse_linear"])
    return cp.CompilationConfig(backend="fx", custom_ops=["none"], **fields)
