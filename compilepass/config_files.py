"""Configurations as text: reading TOML and JSON files, writing TOML.

Only the subset of TOML that a configuration needs is written; reading is the standard library's.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["dump_toml", "read_config_file"]


def read_config_file(path: Path) -> dict[str, Any]:
    """The fields in a ``.toml`` or ``.json`` file, or in its ``[tool.compilepass]`` table."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {str(path)!r}",
            why=str(error),
            hint="Give the path of a .toml or .json file.",
        ) from error
    try:
        data = _parse(path, text)
    except ValueError as error:
        raise ConfigError(
            f"cannot parse the configuration {str(path)!r}",
            why=str(error),
            hint="Correct the syntax at the place named.",
        ) from error
    table = data.get("tool", {}).get("compilepass") if isinstance(data, dict) else None
    if path.name == "pyproject.toml" or table is not None:
        data = table
        if data is None:
            raise ConfigError(
                f"{str(path)!r} has no [tool.compilepass] table",
                why="In a pyproject.toml the configuration lives in that table.",
                hint="Add the table, or load a file of its own.",
            )
    if not isinstance(data, dict):
        raise ConfigError(
            f"{str(path)!r} holds {type(data).__name__}, not a table of fields",
            why="A configuration is a table from field name to value.",
            hint='Example: {"custom_ops": ["none", "+rms_norm"]}.',
        )
    return data


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix == ".toml":
        return tomllib.loads(text)
    raise ValueError(f"the suffix {path.suffix!r} is neither '.toml' nor '.json'")


def dump_toml(fields: Mapping[str, Any]) -> str:
    """TOML text of ``fields``; ``None`` is left out, since TOML has no word for it."""
    lines = (f"{name} = {_toml(name, v)}\n" for name, v in fields.items() if v is not None)
    return "".join(lines)


def _toml(where: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(where, item) for item in value) + "]"
    if isinstance(value, Mapping):
        items = (
            f"{_toml(where, str(key))} = {_toml(f'{where}.{key}', item)}"
            for key, item in value.items()
        )
        return "{" + ", ".join(items) + "}"
    raise ConfigError(
        f"{where} holds {value!r}, which TOML cannot say",
        why="Text holds strings, numbers, booleans, lists and tables.",
        hint="Set this value in code.",
    )
