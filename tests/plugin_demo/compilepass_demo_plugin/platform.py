"""A platform, which runs on the host's processor in place of a real device."""

from __future__ import annotations

import os

import torch

from compilepass.platforms import Capabilities, Platform


class DemoPlatform(Platform):
    """Detected where ``DEMO_PLATFORM=1`` says so; enabled ops run ``forward_oot`` on it."""

    name = "demo"
    device_type = "cpu"
    dispatch_key = "CPU"

    def is_available(self) -> bool:
        return os.environ.get("DEMO_PLATFORM") == "1"

    def capabilities(self) -> Capabilities:
        return Capabilities(isa="demo", dtypes=frozenset({torch.float32}))
