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

from ..native.fused_quantisation import QUANTISATIONS, SOURCES
from ..registry import provider

__all__ = ["TRITON_OPS", "register"]

WIDEST_GROUP = 16384  # as many as a block holds
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
    found = importlib.import_module(f".{module}", __name__)
    op = vars(found).get(short) or found.QUANTISED[short]
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


def _takes_static(tensors: int, *args: Any) -> str | None:
    """A quantisation after so many ``tensors`` of one dtype, with a scale behind them."""
    for value, dtype in zip(args[tensors:], (torch.float32, torch.int32), strict=False):
        if isinstance(value, Tensor) and value.dtype != dtype:
            return f"a scale is float32 and a zero point int32, not {value.dtype}"
        if isinstance(value, Tensor) and value.device != args[0].device:
            return "the tensors are on several devices"
    return _takes(*args[:tensors])


def _takes_groups(tensors: int, *args: Any) -> str | None:
    group = args[tensors]
    if group < 1 or group & (group - 1) or group > WIDEST_GROUP:
        return f"a group is a power of two up to {WIDEST_GROUP}, not {group}"
    return _takes(*args)


def _takes_quantised(tensors: int, settings: tuple[str, ...]) -> Callable[..., str | None]:
    if "int group" in settings:
        return partial(_takes_groups, tensors)
    return partial(_takes_static, tensors) if settings else _takes


def _quantised(module: str, *sources: str) -> dict[str, tuple[str, Callable[..., str | None]]]:
    return {
        f"{source}_{name}_quant": (
            module,
            _takes_quantised(len(SOURCES[source].tensors), quantisation.settings),
        )
        for source in sources
        for name, quantisation in QUANTISATIONS.items()
    }


_GATES = ("fatrelu_and_mul", "gelu_and_mul", "gelu_mul", "mul_and_silu", "silu_and_mul", "silu_mul")
_ACTIVATIONS = (*_GATES, "swigluoai_and_mul", "gelu_fast", "gelu_new", "quick_gelu", "relu2")
_NORMS = ("fused_add_layer_norm", "fused_add_rms_norm", "layer_norm", "rms_norm")

#: The module of each kernel, and which calls it takes.
TRITON_OPS: dict[str, tuple[str, Callable[..., str | None]]] = {
    **dict.fromkeys(_ACTIVATIONS, ("activations", _takes)),
    **dict.fromkeys(_NORMS, ("norms", _takes)),
    **_quantised("activations", *_GATES, "swigluoai_and_mul"),
    **_quantised("norms", *_NORMS),
    **dict.fromkeys(("quant_int8", "asymmetric_quant_int8", "quant_fp8"), ("quantisation", _takes)),
    **dict.fromkeys(
        ("static_quant_int8", "static_quant_fp8"), ("quantisation", partial(_takes_static, 1))
    ),
    "group_quant_fp8": ("quantisation", partial(_takes_groups, 1)),
    **dict.fromkeys(("rms_norm_rotate", "rms_norm_rotate_qk"), ("rotary", _takes)),
    **dict.fromkeys(("rotate", "rotate_qk"), ("rotary", _takes)),
    "rotary_embedding": ("rotary", _takes_rotary_embedding),
    "qk_norm_rope": ("rotary", _takes_qk_norm_rope),
}
