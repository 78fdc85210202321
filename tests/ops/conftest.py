"""Registrations of one test are gone in the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compilepass.ops.registry import HW_AGNOSTIC, MAIN, load_op_plugins


@pytest.fixture(autouse=True)
def _own_registrations() -> Iterator[None]:
    load_op_plugins()  # once for a process, so what they register must not go with a test
    tables = [MAIN.ops, MAIN.oot, HW_AGNOSTIC.ops, HW_AGNOSTIC.oot]
    before = [dict(table) for table in tables]
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)
