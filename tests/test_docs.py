"""The documentation runs: every Python block is executed, every command exists.

The blocks of one file are one program, in order, with the other lines as comments, so that line
numbers in a traceback are the document's. Each file runs in a process and a folder of its own. A
``text`` block is what the Python block before it prints, line numbers of files aside; a line ``…``
stands for lines left out. ``scripts/docs/outputs.py`` writes what is printed into the documents.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^```(?P<language>\w*)(?P<rest>.*)$")
#: Printed after each Python block, with the line after the block.
MARK = "\x1e"
#: Commands of others, which a reader has or is told to install.
FOREIGN = {"cd", "git", "pip", "pytest", "python", "source"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the rest of the fence, and its lines from ``line`` on."""

    language: str
    rest: str
    line: int
    lines: tuple[str, ...]


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a document; one that does not end is an error."""
    fence: re.Match[str] | None = None
    start = 0
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line)
        if fence is None and match:
            fence, start, lines = match, number + 1, []
        elif fence is not None and line == "```":
            yield Block(fence["language"], fence["rest"].strip(), start, tuple(lines))
            fence = None
        elif fence is not None:
            lines.append(line)
    assert fence is None, f"the block before line {start} has no end"


def program(text: str) -> str:
    """The Python blocks of a document as one source with the same line numbers."""
    out = [f"# {line}" for line in text.splitlines()]
    for block in blocks(text):
        if block.language == "python":
            end = block.line - 1 + len(block.lines)
            out[block.line - 1 : end] = block.lines
            out[end] = f"print({MARK!r})"
    return "\n".join(out) + "\n"


def run_document(path: Path, folder: Path) -> list[tuple[Block, list[str]]]:
    """Run the Python blocks of a document in ``folder``; each ``text`` block with what was printed.

    Raises ``AssertionError`` where they fail, and where a ``text`` block is before all of them.
    """
    text = path.read_text()
    script = folder / f"{path.stem}.py"
    script.write_text(program(text))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COMPILEPASS_")}
    done = subprocess.run(
        [sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{name(path)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    printed = iter(done.stdout.split(f"{MARK}\n"))
    pairs, output = [], None
    for block in blocks(text):
        if block.language == "python":
            output = [line.rstrip() for line in next(printed).splitlines()]
        elif block.language == "text":
            assert output is not None, f"{name(path)}:{block.line}: what prints this?"
            pairs.append((block, output))
    return pairs


def is_shown(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether ``shown`` are the lines ``printed``, with ``…`` for some of them."""
    parts = [r"(?:.*\n)*?" if s == "…" else re.escape(_numberless(s)) + r"\n" for s in shown]
    return re.fullmatch("".join(parts), "".join(f"{_numberless(p)}\n" for p in printed)) is not None


def _numberless(line: str) -> str:
    return re.sub(r"\.py:\d+", ".py:N", line.rstrip())


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Each command of the ``bash`` and ``console`` blocks; of the latter, lines after ``$``."""
    for block in blocks(text):
        if block.language not in ("bash", "console"):
            continue
        joined = "\n".join(block.lines).replace("\\\n", " ")
        for line in joined.splitlines():
            if block.language == "console":
                if not line.startswith("$ "):
                    continue
                line = line[2:]
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                yield block.line, words


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


documents = pytest.mark.parametrize("path", DOCUMENTS, ids=name)


@documents
def test_python_blocks_run_and_print_what_is_shown(path: Path, tmp_path: Path) -> None:
    if not any(block.language == "python" for block in blocks(path.read_text())):
        return
    for block, printed in run_document(path, tmp_path):
        assert is_shown(block.lines, printed), (
            f"{name(path)}:{block.line} shows something else than what is printed; "
            f"scripts/docs/outputs.py {name(path)} would write\n" + "\n".join(printed)
        )


@documents
def test_every_block_has_a_language_and_nothing_is_left_out(path: Path) -> None:
    for block in blocks(path.read_text()):
        assert block.language, f"line {block.line}: what language is it?"
        assert not block.rest, f"line {block.line}: ```{block.language} {block.rest}"


@documents
def test_commands_exist(path: Path) -> None:
    for line, words in commands(path.read_text()):
        where = f"{name(path)}, block at line {line}: {' '.join(words)}"
        if words[0] == "compilepass":
            check_own_command(words[1:], where)
        elif "/" in words[0]:
            script = ROOT / words[0]
            assert script.is_file(), where
            assert os.access(script, os.X_OK), f"{where} (is not executable)"
        else:
            assert words[0] in FOREIGN, where
        for word in words[1:]:
            file = word.partition(":")[0]
            if file.startswith(("examples/", "tests/", "docs/", "scripts/")):
                assert (ROOT / file).exists(), f"{where} ({file} does not exist)"


def check_own_command(words: list[str], where: str) -> None:
    """The sub-command and its options must be known to the command line's own help."""
    import typer.main

    from compilepass import cli

    command = typer.main.get_command(cli.app)
    assert words, where
    if words[0].startswith("-"):
        sub: Any = command
    else:
        sub = command
        for word in words:
            if not hasattr(sub, "commands"):
                break
            sub = sub.commands.get(word)
            assert sub is not None, f"{where} (there is no such command)"
    known = {"--help"}
    for parameter in sub.params:
        known.update((*parameter.opts, *parameter.secondary_opts))
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{where} ({word}: known are {sorted(known)})"


@documents
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", prose):
        if "://" not in link:
            assert (path.parent / link).exists(), f"{name(path)}: {link}"


def test_every_field_of_the_configuration_is_described() -> None:
    from compilepass import CompilationConfig

    text = (ROOT / "docs" / "configuration.md").read_text()
    assert [f for f in CompilationConfig.model_fields if f"`{f}`" not in text] == []


def test_the_checks_find_what_is_wrong() -> None:
    text = "# Title\n\n```python\nx = 1\n```\ntext\n\n```python\nassert x == 2\n```\n"
    assert program(text).splitlines()[3] == "x = 1"
    with pytest.raises(AssertionError):
        exec(program(text), {})
    text = (
        "```console\n$ compilepass run \\\n  --x\nout\n```\n```bash\nA=1 scripts/demo  # now\n```\n"
    )
    assert [words for _, words in commands(text)] == [
        ["compilepass", "run", "--x"],
        ["scripts/demo"],
    ]
    assert is_shown(["a.py:1", "…", "z"], ["a.py:27", "b", "c", "z"])
    assert is_shown(["…", "b"], ["b"])
    assert not is_shown(["a"], ["a", "b"])
    assert not is_shown(["…", "c", "b"], ["b", "c"])
    with pytest.raises(AssertionError, match="has no end"):
        list(blocks("```python\nx = 1\n"))
