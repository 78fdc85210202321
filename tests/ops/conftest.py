"""Registrations of one test are gone in the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compilepass.ops.registry import HW_AGNOSTIC, MAIN


@pytest.fixture(autouse=True)
def _own_registrations() -> Iterator[None]:
    tables = [MAIN.ops, MAIN.oot, HW_AGNOSTIC.ops, HW_AGNOSTIC.oot]
    before = [dict(table) for table in tables]
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)
