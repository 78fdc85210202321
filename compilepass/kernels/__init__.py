"""Fused ops: their mathematics, their schemas, and the platform kernels behind them."""

from . import cpu, native, providers, scaled_mm, triton
from .examples import register_examples
from .registry import (
    Availability,
    KernelOp,
    Provider,
    define,
    ensure_loaded,
    find,
    kernel_ops,
    needs_grad,
    prefer,
    provider,
)
from .shipped import SHIPPED

cpu.register()
triton.register()
providers.register()
scaled_mm.register()

__all__ = [
    "SHIPPED",
    "Availability",
    "KernelOp",
    "Provider",
    "define",
    "ensure_loaded",
    "find",
    "kernel_ops",
    "native",
    "needs_grad",
    "prefer",
    "provider",
    "register_examples",
]
