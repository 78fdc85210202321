"""depyf's decompiled Dynamo code beside our own dump.

depyf patches parts of Dynamo while it watches, so it is switched on for the first call only. If it
stumbles over a torch release, the reason is written down and our own dump stands.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["watch_first_call"]


def watch_first_call(fast: Any, path: Path, done: Callable[[], None]) -> Any:
    """``fast`` with depyf watching its first call, writing to ``path``; ``done`` runs after it."""
    state = {"watch": True}
    inner = fast.forward if isinstance(fast, nn.Module) else fast

    def call(*args: Any, **kwargs: Any) -> Any:
        if not state["watch"]:
            return inner(*args, **kwargs)
        state["watch"] = False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                watcher = _prepare(path)
                watcher.__enter__()
        except Exception:
            _give_up(path)
            out = inner(*args, **kwargs)
        else:
            out = inner(*args, **kwargs)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    watcher.__exit__(None, None, None)
            except Exception:
                _give_up(path)
        done()
        return out

    if isinstance(fast, nn.Module):
        fast.forward = call
        return fast
    return call


def _prepare(path: Path) -> Any:
    import depyf

    path.mkdir(parents=True, exist_ok=True)
    return depyf.prepare_debug(str(path))


def _give_up(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "depyf_failed.txt").write_text(traceback.format_exc())
