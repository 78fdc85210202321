"""Run what was written for a narrower dtype in float64, as the reference for its rounding.

    with InFloat64():
        exact = fn(*widen(args))

Inside, every request for a narrower floating dtype (``.float()`` in a norm, ``dtype=`` of a cast)
gets float64, and fused kernels run their native reference; integers stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .registry import find

__all__ = ["InFloat64", "widen"]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises ``TypeError`` where the bits of a tensor are read as another dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kernel = find(func)
        if kernel is not None:
            with self:
                return kernel.run_native(*args, **kwargs)
        if func is torch.ops.aten.view.dtype:
            raise TypeError("it reads the bits of a tensor as another dtype")
        if not func._schema.is_mutable:  # what is written to must stay the caller's tensor
            args, kwargs = widen((args, kwargs))
        return widen(func(*args, **kwargs))


def widen(values: Any) -> Any:
    """``values``, a tree, with narrow floating tensors and dtypes as float64."""
    return tree_map(_widened, values)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    return value.double() if isinstance(value, Tensor) and value.dtype in _NARROW else value
