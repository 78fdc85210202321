"""Platforms: what the machine is, and the only place that asks."""

from .base import FORWARD_METHODS, Capabilities, Platform
from .builtin import CpuPlatform, CudaPlatform, RocmPlatform, XpuPlatform
from .detection import (
    current_platform,
    get_platform,
    list_platforms,
    platform_for,
    register_platform,
    unregister_platform,
    use_platform,
)

__all__ = [
    "FORWARD_METHODS",
    "Capabilities",
    "CpuPlatform",
    "CudaPlatform",
    "Platform",
    "RocmPlatform",
    "XpuPlatform",
    "current_platform",
    "get_platform",
    "list_platforms",
    "platform_for",
    "register_platform",
    "unregister_platform",
    "use_platform",
]
