"""Lets Triton kernels be compiled and traced for a GPU on a machine that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

NVIDIA, AMD = ("cuda", 90, 32), ("hip", "gfx942", 64)


class _Driver:
    """Tells a tracer for which GPU it traces; there is none to run anything."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*NVIDIA)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def absent_gpu() -> Iterator[None]:
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Driver())
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def only_compiled() -> Iterator[list[str]]:
    """Compile what is launched, for the arguments it is launched with; the names of the kernels."""
    from triton.runtime.autotuner import Autotuner

    launched: list[str] = []

    def compile_only(self: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        kwargs.pop("warmup", None)
        config = self.configs[0].all_kwargs()
        self.fn.warmup(*args, grid=(1,) if callable(grid) else grid, **kwargs, **config)
        launched.append(self.base_fn.__name__)

    run = Autotuner.run
    Autotuner.run = compile_only
    try:
        with absent_gpu():
            yield launched
    finally:
        Autotuner.run = run


class _Captured(Exception):
    pass


def traced(function: Callable[..., Any], args: tuple[Any, ...], dynamic: bool) -> torch.fx.Graph:
    """The graph that Inductor would get of a call, which is not made."""
    graphs: list[torch.fx.Graph] = []

    def capture(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        raise _Captured

    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend=aot_autograd(fw_compiler=capture), dynamic=dynamic, fullgraph=True
    )
    with absent_gpu(), torch.no_grad():
        try:
            compiled(*args)
        except Exception:
            if not graphs:
                raise
    torch._dynamo.reset()
    return graphs[0]


def launches(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The launches of Triton kernels in a graph."""
    return [n for n in graph.nodes if str(n.target) == "triton_kernel_wrapper_functional"]
