"""Pages that must agree with the code: the table of equivalences, and a section for every code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from compilepass.rewrite import REJECT_CODES

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"^### (.*?)\n(.*?)(?=^##|\Z)", re.DOTALL | re.MULTILINE)

sections = dict(SECTION.findall((ROOT / "docs" / "reject-codes.md").read_text()))


def test_the_table_of_equivalences_is_what_the_code_has() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "docs" / "equivalences.py"))
    text = script["PAGE"].read_text()
    assert text == script["page"](text), "run scripts/docs/equivalences.py"


def test_every_reject_code_has_a_section_and_every_section_is_one() -> None:
    assert sorted(sections) == sorted(REJECT_CODES)


@pytest.mark.parametrize("code", REJECT_CODES)
def test_a_section_has_the_meaning_and_an_example_that_is_run(code: str) -> None:
    """``test_docs`` checks that what is shown is printed."""
    text = sections[code]
    assert REJECT_CODES[code].lower() in text.lower()
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    first = shown.splitlines()[0]
    if code == "partial_kernel":  # what is fused already is no near miss
        assert first == "{'partial_kernel': 1} near miss: None"
    else:
        assert f" [{code}; " in first
