"""depyf's decompiled Dynamo code beside our own dump.

depyf patches parts of Dynamo while it watches, so it is switched on for the first call only. If it
stumbles over a torch release, the reason is written down and our own dump stands.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["watching"]


@contextmanager
def watching(path: Path) -> Iterator[None]:
    """Have depyf write what Dynamo compiles in the scope to ``path``; errors of the scope pass."""
    watcher = _quietly(path, lambda: _entered(path))
    try:
        yield
    finally:
        if watcher is not None:
            _quietly(path, lambda: watcher.__exit__(None, None, None))


def _entered(path: Path) -> Any:
    import depyf

    path.mkdir(parents=True, exist_ok=True)
    watcher = depyf.prepare_debug(str(path))
    watcher.__enter__()
    return watcher


def _quietly(path: Path, act: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return act()
    except Exception:
        with suppress(OSError):
            (path.parent / "depyf_failed.txt").write_text(traceback.format_exc())
        return None
