#!/usr/bin/env python3
"""Write the table of equivalences into docs/equivalences.md, between its two markers."""

from __future__ import annotations

from pathlib import Path

from compilepass.rewrite import equivalences

PAGE = Path(__file__).parents[2] / "docs" / "equivalences.md"
BEGIN, END = "<!-- begin: scripts/docs/equivalences.py -->", "<!-- end -->"


def table() -> str:
    """The table in Markdown."""
    rows = [
        (f"`{name}`", ", ".join(f"`{op}`" for op in ops), meaning.replace("|", r"\|"))
        for name, ops, meaning in equivalences()
    ]
    lines = [("name", "at", "meaning"), ("---", "---", "---"), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(text: str) -> str:
    """``text`` with the table as the code has it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
