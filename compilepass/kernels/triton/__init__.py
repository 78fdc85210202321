"""Triton kernels for CUDA and ROCm devices, and what they take.

Each is a ``torch.library.triton_op`` in the namespace ``compilepass_triton``, which Inductor sees
into, and the provider ``triton`` of the op of the same name. Nothing here imports Triton before a
kernel is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..registry import provider

__all__ = ["TRITON_OPS", "register"]

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def register(device_type: str = "cuda", priority: int = 0) -> None:
    """Register the Triton providers of the shipped ops; nothing is imported or compiled yet.

    ``cuda`` is ROCm's name in torch as well. With ``TRITON_INTERPRET=1`` in the environment before
    Triton is imported, the kernels run on ``cpu`` tensors, slowly: that is how they are tested.
    """
    for short, (module, supports) in TRITON_OPS.items():
        provider(
            f"compilepass::{short}",
            name="triton",
            device_type=device_type,
            load=partial(_load, module, short),
            priority=priority,
            supports=supports,
            available=partial(_available, device_type),
        )


def _available(device_type: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "not installed: pip install compilepass[triton]"
    if device_type == "cuda" and not torch.cuda.is_available():
        return "torch finds no CUDA or ROCm device"
    return None


def _load(module: str, short: str) -> Callable[..., Any]:
    """What the op of that name runs for tensors that nothing traces, without the op around it."""
    op = getattr(importlib.import_module(f".{module}", __name__), short)
    function: Callable[..., Any] = op._init_fn
    return function


def _takes(*args: Any) -> str | None:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) > 1:
        return f"one dtype for all tensors is needed, not {sorted(map(str, dtypes))}"
    if not dtypes <= DTYPES:
        return f"{tensors[0].dtype} is not float32, bfloat16 or float16"
    if len({t.device for t in tensors}) > 1:
        return "the tensors are on several devices"
    if tensors[0].dim() == 0 or tensors[0].shape[-1] == 0:
        return "there is no element in a row"
    return None


def _takes_rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> str | None:
    if not {cos.dtype, sin.dtype} <= DTYPES:
        return f"cos and sin must be float32, bfloat16 or float16, not {cos.dtype}"
    if q.dim() < 2 or k.dim() < 2:
        return "q and k have a dimension of heads"
    return _takes(q, k)


def _takes_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *_: Any,
) -> str | None:
    return _takes_rotary_embedding(q, k, cos, sin, False) or _takes(q, k, q_weight, k_weight)


#: The module of each kernel, and which calls it takes.
TRITON_OPS: dict[str, tuple[str, Callable[..., str | None]]] = {
    **dict.fromkeys(
        (
            "fatrelu_and_mul",
            "gelu_and_mul",
            "gelu_and_mul_dynamic_int8_quant",
            "gelu_fast",
            "gelu_mul",
            "gelu_mul_dynamic_int8_quant",
            "gelu_new",
            "mul_and_silu",
            "quick_gelu",
            "relu2",
            "silu_and_mul",
            "silu_and_mul_dynamic_int8_quant",
            "silu_mul",
            "silu_mul_dynamic_int8_quant",
            "swigluoai_and_mul",
        ),
        ("activations", _takes),
    ),
    **dict.fromkeys(
        (
            "fused_add_layer_norm",
            "fused_add_rms_norm",
            "fused_add_rms_norm_dynamic_int8_quant",
            "layer_norm",
            "rms_norm",
            "rms_norm_dynamic_int8_quant",
        ),
        ("norms", _takes),
    ),
    "quant_int8": ("quantisation", _takes),
    "rms_norm_rotate": ("rotary", _takes),
    "rotate": ("rotary", _takes),
    "rotary_embedding": ("rotary", _takes_rotary_embedding),
    "qk_norm_rope": ("rotary", _takes_qk_norm_rope),
}
