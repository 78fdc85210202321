"""What a platform is: a device type, how it is reached, and what it can do.

A platform has no state: its class attributes say what it is, its methods ask the machine. A package
ships one as an entry point in the group ``compilepass.platforms``; a minimal one::

    class NpuPlatform(Platform):
        name = device_type = "npu"
        dispatch_key = "PrivateUse1"
        def is_available(self): return hasattr(torch, "npu") and torch.npu.is_available()
        def capabilities(self): return Capabilities(isa="npu-v2", dtypes=frozenset({torch.float16}))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import PlatformError, did_you_mean

__all__ = ["FORWARD_METHODS", "Capabilities", "Platform", "check_platform"]

#: The methods of a ``CustomOp`` that a platform may choose.
FORWARD_METHODS = (
    "forward_native",
    "forward_cuda",
    "forward_hip",
    "forward_xpu",
    "forward_cpu",
    "forward_tpu",
    "forward_hpu",
    "forward_oot",
)


@dataclass(frozen=True)
class Capabilities:
    """What a platform can do here and now.

    isa: the vector instruction set or architecture (``"AVX2"``, ``"sm_90"``, ``"gfx942"``).
    compute_capability: CUDA's (major, minor), else ``None``.
    dtypes: the dtypes that its kernels may compute in.
    has_triton: whether Triton generates code for it.
    threads: threads of one kernel on a CPU, else 1.
    vendor: who made a CPU, as it says itself (``"AuthenticAMD"``), or ``""``.
    """

    isa: str
    dtypes: frozenset[torch.dtype]
    compute_capability: tuple[int, int] | None = None
    has_triton: bool = False
    threads: int = 1
    vendor: str = ""


class Platform(ABC):
    """One kind of device; subclasses set the attributes and answer the two questions.

    name: unique, as in ``get_platform(name)``.
    device_type: as in ``torch.device(device_type)``.
    dispatch_key: under which ``torch.library`` kernels for it register.
    forward_method: the ``CustomOp`` method that enabled ops run, one of ``FORWARD_METHODS``.
    simple_compile_backend: the Dynamo backend for functions that are compiled on their own.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    dispatch_key: ClassVar[str]
    forward_method: ClassVar[str] = "forward_oot"
    simple_compile_backend: ClassVar[str] = "inductor"

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this process can run on it."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it can do; asked only when it is available."""

    def __repr__(self) -> str:
        return f"<platform {self.name!r}>"


def check_platform(platform: object) -> Platform:
    """Return ``platform`` if it is usable, else raise what its author must change."""
    if not isinstance(platform, Platform):
        raise PlatformError(
            f"{platform!r} is not a Platform",
            why="A platform answers is_available() and capabilities().",
            hint="Subclass compilepass.platforms.Platform and give an instance.",
        )
    for attribute in ("name", "device_type", "dispatch_key"):
        value = getattr(platform, attribute, None)
        if not isinstance(value, str) or not value:
            raise PlatformError(
                f"{type(platform).__qualname__}.{attribute} is {value!r}",
                why="It must be a string that is not empty.",
                hint=f'Set it in the class: {attribute} = "npu".',
            )
    if platform.forward_method not in FORWARD_METHODS:
        raise PlatformError(
            f"platform {platform.name!r} has forward_method={platform.forward_method!r}",
            why="A CustomOp has no such method.",
            hint=did_you_mean(platform.forward_method, FORWARD_METHODS),
        )
    return platform
