"""Texts of near misses as they are written down, and the way to write them again.

``python -m tests.rewrite.golden`` writes ``golden/*.txt`` anew; read the diff before you keep it.
Line numbers, which change with every edit, are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from compilepass.reporting import NearMiss

__all__ = ["golden", "text_of"]

FOLDER = Path(__file__).parent / "golden"


def text_of(near: NearMiss) -> str:
    """A near miss as text, with its model lines cut short."""
    lines = re.sub(r"(\.py):\d+", r"\1:N", str(near)).splitlines()
    return "\n".join(line if len(line) < 120 else line[:119] + "…" for line in lines)


def golden(file: str, name: str) -> str:
    """The text that is written down under ``name``."""
    parts = (FOLDER / f"{file}.txt").read_text().split("== ")
    texts = dict(part.rstrip().split("\n", 1) for part in parts if part)
    return texts.get(name, "")


def write() -> None:
    from .near_misses import CASES as NEAR
    from .one_rule import apply
    from .test_refusals import CASES as REFUSED

    FOLDER.mkdir(exist_ok=True)
    near = {c.name: apply(c.model, c.args, c.rule).near for c in NEAR}
    refused = {c.name: apply(c.fn, c.args, c.rule, dynamic=c.dynamic).near for c in REFUSED}
    for file, found in (("near_misses", near), ("refusals", refused)):
        texts = [f"== {name}\n{text_of(n)}\n" for name, n in found.items() if n is not None]
        (FOLDER / f"{file}.txt").write_text("\n".join(texts))


if __name__ == "__main__":
    write()
