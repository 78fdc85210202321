"""The platforms that ship: cpu, cuda, rocm and xpu."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from .base import Capabilities, Platform

__all__ = ["BUILTIN_PLATFORMS", "CpuPlatform", "CudaPlatform", "RocmPlatform", "XpuPlatform"]

_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_INTS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _cpu_vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""  # not Linux
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(named, "")


class CpuPlatform(Platform):
    """The host's processor: always available."""

    name = device_type = "cpu"
    dispatch_key = "CPU"
    forward_method = "forward_cpu"

    def is_available(self) -> bool:
        return True

    def capabilities(self) -> Capabilities:
        return Capabilities(
            isa=torch.backends.cpu.get_cpu_capability(),
            dtypes=_FLOATS | _INTS,
            threads=torch.get_num_threads(),
            vendor=_cpu_vendor(),
        )


class CudaPlatform(Platform):
    """NVIDIA GPUs."""

    name = device_type = "cuda"
    dispatch_key = "CUDA"
    forward_method = "forward_cuda"

    def is_available(self) -> bool:
        return torch.version.hip is None and torch.cuda.is_available()

    def capabilities(self) -> Capabilities:
        major, minor = torch.cuda.get_device_capability()
        fp8 = _FP8 if (major, minor) >= (8, 9) else frozenset()
        return Capabilities(
            isa=f"sm_{major}{minor}",
            dtypes=_FLOATS | _INTS | fp8,
            compute_capability=(major, minor),
            has_triton=(major, minor) >= (7, 0) and _has_triton(),
        )


class RocmPlatform(Platform):
    """AMD GPUs: torch calls the device type and dispatch key of a HIP build "cuda" too."""

    name = "rocm"
    device_type = "cuda"
    dispatch_key = "CUDA"
    forward_method = "forward_hip"

    def is_available(self) -> bool:
        return torch.version.hip is not None and torch.cuda.is_available()

    def capabilities(self) -> Capabilities:
        isa = torch.cuda.get_device_properties().gcnArchName.partition(":")[0]
        return Capabilities(isa=isa, dtypes=_FLOATS | _INTS, has_triton=_has_triton())


class XpuPlatform(Platform):
    """Intel GPUs."""

    name = device_type = "xpu"
    dispatch_key = "XPU"
    forward_method = "forward_xpu"

    def is_available(self) -> bool:
        return torch.xpu.is_available()

    def capabilities(self) -> Capabilities:
        return Capabilities(
            isa=torch.xpu.get_device_name(), dtypes=_FLOATS | _INTS, has_triton=_has_triton()
        )


#: In the order in which detection asks them.
BUILTIN_PLATFORMS: tuple[Platform, ...] = (
    CudaPlatform(),
    RocmPlatform(),
    XpuPlatform(),
    CpuPlatform(),
)
