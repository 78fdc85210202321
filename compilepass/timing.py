"""Times of several functions, measured so that they can be compared.

The functions take turns, so that a machine that slows down slows all of them; of each the minimum
counts, the run that was disturbed least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

__all__ = ["interleaved_minima"]


def interleaved_minima(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The shortest of ``repeats`` runs of each call, in seconds, after one run to warm up."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            taken = time.perf_counter() - start
            if turn:
                best[name] = min(best[name], taken)
    return best
