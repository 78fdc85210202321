#!/usr/bin/env python3
"""Write what the documents' Python blocks print into the ``text`` blocks after them.

    scripts/docs/outputs.py docs/near-misses.md

Blocks in which ``…`` stands for lines left out are kept: they are a choice.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.test_docs import is_shown, run_document


def write(path: Path) -> None:
    """Bring the ``text`` blocks of one document up to date."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = run_document(path, Path(folder))
    lines = path.read_text().splitlines()
    for block, printed in reversed(pairs):
        if "…" not in block.lines and not is_shown(block.lines, printed):
            lines[block.line - 1 : block.line - 1 + len(block.lines)] = printed
            print(f"{path}:{block.line}: written")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name).resolve())
