"""The line of the user's model that a node came from."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from torch.fx import Node

__all__ = ["innermost_line", "source_of"]

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<where>\S+)\n\s*(?P<code>.+)'
)
_PACKAGE = str(Path(__file__).parents[1])


def source_of(node: Node | None) -> str:
    """``modeling_llama.py:67 in forward: return self.weight * …``, or ``""`` where it is unknown.

    The innermost frame outside of this package is taken: where a model calls one of our layers,
    the line of the model.
    """
    trace = node.meta.get("stack_trace") if node is not None else None
    return innermost_line(trace) if trace else ""


@functools.lru_cache(4096)
def innermost_line(trace: str) -> str:
    """The line of a stack trace that is not this package's own."""
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return ""
    outside = [f for f in frames if not f["file"].startswith(_PACKAGE)]
    last = (outside or frames)[-1]
    return f"{Path(last['file']).name}:{last['line']} in {last['where']}: {last['code'].strip()}"
