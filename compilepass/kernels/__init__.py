"""Fused ops: their mathematics, their schemas, and the platform kernels behind them."""

from . import cpu, native, triton
from .registry import (
    Availability,
    KernelOp,
    Provider,
    define,
    ensure_loaded,
    find,
    kernel_ops,
    needs_grad,
    provider,
)
from .shipped import SHIPPED

cpu.register()
triton.register()

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
    "provider",
]
