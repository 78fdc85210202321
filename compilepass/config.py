"""Stand-in with the three readers of environment variables that kernels need; replace at merge."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir", "cpp_disabled", "cxx"]


def cache_dir() -> Path:
    """Where builds are kept: COMPILEPASS_CACHE_DIR, else XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("COMPILEPASS_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "compilepass"


def cxx() -> str | None:
    """The C++ compiler that the user chose (COMPILEPASS_CXX, CXX), if any."""
    return os.environ.get("COMPILEPASS_CXX") or os.environ.get("CXX") or None


def cpp_disabled() -> bool:
    """Whether COMPILEPASS_NO_CPP forbids building C++ kernels."""
    return os.environ.get("COMPILEPASS_NO_CPP", "").lower() not in ("", "0", "false", "no")
