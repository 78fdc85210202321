"""Kernels of other projects, as providers for who has them installed.

One module a package, which is imported when a kernel of it is first needed. They come after our own
in priority: which is faster depends on the GPU, and theirs round less often than native does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from ..registry import provider

__all__ = ["PACKAGES", "PRIORITY", "missing", "register"]

PRIORITY = -10

#: What ``pip`` calls each, and the first release whose functions are those that we call.
PACKAGES = {"flashinfer": "flashinfer-python", "liger": "liger-kernel", "quack": "quack-kernels"}
_RELEASES = {"flashinfer": "0.2", "liger": "0.6.4", "quack": "0.6.5"}
_NVIDIA_ONLY = ("flashinfer", "quack")


def register() -> None:
    """Register the providers of all the packages for CUDA devices; nothing is imported yet."""
    for name, ops in _OPS.items():
        for op, supports in ops.items():
            provider(
                f"compilepass::{op}",
                name=name,
                device_type="cuda",
                load=partial(_load, name, op),
                priority=PRIORITY,
                supports=supports,
                available=partial(missing, name),
            )


def missing(name: str) -> str | None:
    """Why the kernels of a package cannot run on this machine, or ``None``."""
    package, needed = PACKAGES[name], _RELEASES[name]
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"not installed: pip install {package}"
    if Version(installed) < Version(needed):
        return f"{installed} is older than {needed}: pip install -U {package}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA or ROCm device"
    if name in _NVIDIA_ONLY and torch.version.hip is not None:
        return f"{package} is for NVIDIA GPUs"
    return None


def _load(name: str, op: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f".{name}", __name__), op)
    return function


def _one_dtype(tensors: tuple[Tensor, ...], allowed: tuple[torch.dtype, ...]) -> str | None:
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) > 1:
        return f"one dtype for all tensors is needed, not {sorted(map(str, dtypes))}"
    if not dtypes <= set(allowed):
        return f"{tensors[0].dtype} is none of {', '.join(map(str, allowed))}"
    if tensors[0].dim() == 0 or tensors[0].shape[-1] == 0:
        return "there is no element in a row"
    return None


_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_HALVES)


def _rounds_once(x: Tensor, variant: str) -> str | None:
    if variant == "llama" and x.dtype != torch.float32:
        return "it rounds once, and variant='llama' rounds before the weight as well"
    return None


def _flashinfer_norm(x: Tensor, weight: Tensor, eps: float, variant: str = "llama") -> str | None:
    return _one_dtype((x, weight), _HALVES) or _rounds_once(x, variant)


def _flashinfer_gate(x: Tensor, approximate: str = "") -> str | None:
    if reason := _one_dtype((x,), _HALVES):
        return reason
    # releases before 0.3 read 16 bytes at a time
    return None if x.shape[-1] % 16 == 0 else f"a width of {x.shape[-1]} is no multiple of 16"


def _quack_norm(x: Tensor, weight: Tensor, eps: float, variant: str = "llama") -> str | None:
    return _one_dtype((x, weight), _FLOATS) or _rounds_once(x, variant)


def _quack_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: str = "llama"
) -> str | None:
    return _one_dtype((x, residual, weight), _FLOATS) or _rounds_once(x, variant)


def _quack_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> str | None:
    if reason := _one_dtype((q, k), _FLOATS) or _one_dtype((cos, sin), _FLOATS):
        return reason
    for x in (q, k):
        if x.shape[:-2] != cos.shape[:-1] or cos.shape != sin.shape:
            return "each token has a row of cos and of sin"
        if x.shape[-1] % 8 or x.shape[-1] > 512 or cos.shape[-1] % 4:
            return "heads and what is rotated of them are multiples of 8, 512 at most"
    return None


_LIGER_WIDEST = 65536  # its kernels hold a row in one block


def _liger_row(*args: Any) -> str | None:
    tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
    if reason := _one_dtype(tensors, _FLOATS):
        return reason
    width = tensors[0].shape[-1]
    return (
        f"a row of {width} elements is wider than {_LIGER_WIDEST}"
        if width > _LIGER_WIDEST
        else None
    )


def _liger_gelu(gate: Tensor, up: Tensor, approximate: str) -> str | None:
    return _liger_row(gate, up) if approximate == "tanh" else "it has GELU by tanh only"


_OPS: dict[str, dict[str, Callable[..., str | None]]] = {
    "flashinfer": {
        "rms_norm": _flashinfer_norm,
        "silu_and_mul": _flashinfer_gate,
        "gelu_and_mul": _flashinfer_gate,
    },
    "liger": {
        "rms_norm": _liger_row,
        "fused_add_rms_norm": _liger_row,
        "silu_mul": _liger_row,
        "gelu_mul": _liger_gelu,
    },
    "quack": {
        "rms_norm": _quack_norm,
        "fused_add_rms_norm": _quack_add_norm,
        "rotary_embedding": _quack_rotary,
    },
}
