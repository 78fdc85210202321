"""A model computed in float64: the reference that errors are measured against.

The copy has the model's own weights, widened exactly. While it runs, every request for a narrower
floating dtype (``.float()`` in a norm, ``dtype=torch.bfloat16`` of a mask) gets float64, custom ops
run their native forward and fused kernels their native reference; so the mathematics is the
model's, and no rounding but float64's is left. Integers stay what they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .errors import CompilePassError
from .kernels.float64 import InFloat64, widen
from .ops.custom_op import DispatchedOp

__all__ = ["run_in_float64"]


def run_in_float64(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs of ``model`` in float64; ``model`` itself is left as it is.

    Raises :class:`CompilePassError` where the model cannot be run so.
    """
    try:
        if isinstance(model, nn.Module):
            model = _widened_copy(model)
        args, kwargs = widen((args, kwargs))
        with torch.compiler.set_stance("force_eager"), InFloat64():
            return model(*args, **kwargs)
    except Exception as error:
        raise CompilePassError(
            f"{type(model).__name__} cannot be run in float64, to measure errors against",
            why=f"{type(error).__name__}: {error}",
            hint="A kernel that takes no float64 needs a native form: kernels.define(…, native=…), "
            "or forward_native of the CustomOp that calls it.",
        ) from error


def _widened_copy(model: nn.Module) -> nn.Module:
    wide = copy.deepcopy(model).double()
    for module in wide.modules():
        if isinstance(module, DispatchedOp):
            module.make_native()
    return wide
