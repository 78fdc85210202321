"""Compile a native forward that a model-level ``torch.compile`` cannot see.

It runs inside an opaque op, where it would otherwise be eager. Nothing of Dynamo is imported before
the first call that compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from ..config import CompilationMode, get_config
from ..platforms import current_platform
from ..torch_compat import dynamic_dims, inductor_has_option
from .dynamic_args import ArgDims, DynamicArgs

__all__ = ["compile_native", "maybe_compile", "maybe_disable_graph_partition", "native_backend"]

F = TypeVar("F", bound=Callable[..., Any])


def maybe_compile(
    fn: F, *, enable: bool = True, dynamic_arg_dims: Mapping[str, ArgDims] | None = None
) -> F:
    """Compile ``fn`` with the platform's simple backend, or return ``fn`` itself.

    It is returned when ``enable`` is false, when the active config's ``mode`` is ``NONE``, and
    when the backend is ``"eager"``. With ``dynamic_arg_dims`` (see ``dynamic_args``) the dims named
    there are dynamic and all other sizes static; without, all are dynamic.

    PyTorch specialises sizes 0 and 1 even where a dim is marked, so a call with such a size of a
    declared dim runs ``fn`` uncompiled: it is right, and costs no compile for that one size. While
    Dynamo or export traces a caller, ``fn`` is inlined as it is.
    """
    backend = native_backend(enable)
    return fn if backend is None else compile_native(fn, backend, dynamic_arg_dims)


def native_backend(enable: bool) -> str | None:
    """The backend that native forwards are compiled with under the active config, or ``None``."""
    config = get_config()
    backend = current_platform().simple_compile_backend
    if not enable or config.mode is CompilationMode.NONE or "eager" in (config.backend, backend):
        return None
    return backend


def compile_native(fn: F, backend: str, dims: Mapping[str, ArgDims] | None) -> F:
    """Compile ``fn`` with ``backend`` when it is first called, with ``dims`` marked as dynamic."""
    declared = DynamicArgs.of(fn, dims) if dims else None

    @functools.cache
    def compiled() -> Callable[..., Any]:
        options = maybe_disable_graph_partition(backend)
        return torch.compile(fn, backend=backend, dynamic=declared is None, **options)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        if declared is None:
            return compiled()(*args, **kwargs)
        marks = declared.bind(args, kwargs)
        if any(tensor.shape[dim] < 2 for tensor, dim in marks):
            return fn(*args, **kwargs)
        with dynamic_dims(marks):
            return compiled()(*args, **kwargs)

    return cast(F, call)


def maybe_disable_graph_partition(backend: str) -> dict[str, Any]:
    """Keyword arguments of ``torch.compile`` that switch graph partition off, where there is one.

    A small function that runs inside an opaque op gains nothing from being split.
    """
    if backend == "inductor" and inductor_has_option("graph_partition"):
        return {"options": {"graph_partition": False}}
    return {}
