"""Calls are timed in turn, and the shortest time counts."""

from __future__ import annotations

import time

from compilepass.timing import interleaved_minima


def test_calls_take_turns_and_the_minimum_counts() -> None:
    calls: list[str] = []
    first_is_slow = iter([0.05, 0.03, 0.01, 0.03])

    def slow_at_first() -> None:
        calls.append("a")
        time.sleep(next(first_is_slow))

    best = interleaved_minima({"a": slow_at_first, "b": lambda: calls.append("b")}, repeats=3)
    assert "".join(calls) == "abababab"
    assert 0.01 <= best["a"] < 0.03
    assert best["b"] < best["a"]
