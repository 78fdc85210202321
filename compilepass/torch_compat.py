"""The few differences and private names of torch that modules below ``inductor`` need.

Everything else that is private to torch stays in ``compilepass.inductor``. This module sits beside
``errors``, so that ``ops`` can mark dynamic sizes without importing upwards. Importing it does not
import Dynamo or Inductor: each function does so when it is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx import Graph

__all__ = [
    "call_targets",
    "dynamic_dims",
    "fake_like",
    "fake_view",
    "inductor_has_option",
    "isolated",
]

#: Attributes that ``mark_dynamic`` leaves on a tensor (torch 2.11 to 2.14).
_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
    "_specialize_on",
    "_has_dynamo_dim_marking",
)


@contextmanager
def dynamic_dims(dims: Iterable[tuple[Tensor, int]]) -> Iterator[None]:
    """Mark each (tensor, dim) as dynamic for the duration of one call.

    The marks live on the caller's tensors: left there, they would make a later compile of the
    caller's own that specialises the size fail. So they are put back as they were.
    """
    from torch._dynamo import mark_dynamic

    dims = list(dims)
    tensors = {id(tensor): tensor for tensor, _ in dims}
    saved = {key: _marks(tensor) for key, tensor in tensors.items()}
    try:
        for tensor, dim in dims:
            mark_dynamic(tensor, dim)
        yield
    finally:
        for key, tensor in tensors.items():
            for name in _MARKS:
                tensor.__dict__.pop(name, None)
            tensor.__dict__.update(saved[key])


def _marks(tensor: Tensor) -> dict[str, Any]:
    present = {name: tensor.__dict__[name] for name in _MARKS if name in tensor.__dict__}
    return {name: v.copy() if isinstance(v, set | dict) else v for name, v in present.items()}


def inductor_has_option(name: str) -> bool:
    """Whether this torch's Inductor has the option ``name`` (``"graph_partition"``)."""
    from torch._inductor import config

    return hasattr(config, name)


def isolated() -> dict[str, bool]:
    """Options of ``torch.compile`` that keep what one call compiles apart from all others.

    Without them, the calls on one function share a limit of eight compiled forms, and a ninth
    backend silently runs eager. Drop the question when torch >= 2.13.
    """
    known = inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if "isolate_recompiles" in known else {}


def call_targets(graph: Graph) -> list[Any]:
    """The targets of a graph's calls, also of some that are gone; read without a pass over it."""
    return [target for op, target in graph._find_nodes_lookup_table.table if op == "call_function"]


def fake_like(
    like: Tensor,
    mode: FakeTensorMode,
    memory: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    shape: Sequence[Any] | None = None,
    strides: Sequence[Any] | None = None,
) -> Tensor:
    """A fake tensor of ``mode`` with the layout of ``like``, made without running an operation.

    ``dtype`` and ``strides`` (without gaps) are others, if given; with ``shape`` it is row-major.
    ``memory`` is
    ``(there, here)``: where ``like`` is a view of ``there``, the new one is the same view of
    ``here``; else it has memory of its own. This is ten times as fast as dispatching the operation
    again, and is what the cache of ``FakeTensorMode`` does on a hit.
    """
    env, is_dense = mode.shape_env, shape is not None or strides is not None
    sizes, dtype, strides = shape or like.shape, dtype or like.dtype, strides or like.stride()
    if shape is not None:
        strides = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]
    offset: Any = 0
    if memory is not None:
        there, here = memory
        offset = like.storage_offset() - there.storage_offset() + here.storage_offset()
    if all(type(n) is int for n in (*sizes, *strides, offset)):
        with torch._C._DisableTorchDispatch():
            if memory is None:
                meta = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
            else:
                storage: Any = here.untyped_storage()
                meta = torch.empty(0, dtype=dtype, device="meta")
                meta.set_(storage, offset, sizes, strides)
        return FakeTensor(mode, meta, like.device)
    # Making a tensor of symbolic sizes asks whether it is contiguous; making a view asks later.
    with in_kernel_invocation_manager(mode), env.suppress_guards() if env else nullcontext():
        if memory is None:
            bytes_: Any = like.untyped_storage().nbytes()
            count = prod(sizes) if is_dense else bytes_ // like.dtype.itemsize
            whole = torch.empty((count,), dtype=dtype, device="meta")
        else:
            whole = here if here.dtype == dtype else here.view(dtype)
        meta = whole.as_strided(sizes, strides, offset)
    return FakeTensor(mode, meta, like.device)


def fake_view(
    of: FakeTensor, sizes: Sequence[Any], strides: Sequence[Any], offset: Any = 0
) -> Tensor:
    """A view of a fake tensor from the element at ``offset`` on, made without an operation."""
    mode, env = of.fake_mode, of.fake_mode.shape_env
    with in_kernel_invocation_manager(mode), env.suppress_guards() if env else nullcontext():
        meta = of.as_strided(sizes, strides, of.storage_offset() + offset)
    return FakeTensor(mode, meta, of.device)
