"""The ± grammar that ``custom_ops`` and ``passes`` share.

A list holds at most one *base* word, then signed names; both lists have one parser::

    custom_ops = ["none", "+rms_norm"]
    passes     = ["default", "-fuse_act_quant", "+fuse_norm_quant{min_rows=16}"]

Two bases, or ``+x`` with ``-x``, are a ``ConfigError``, at construction and at every later change
of the list, which then stays as it was. Whether a *name* exists is not judged here: a plugin may
still register it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex, TypeVar

from .errors import ConfigError, did_you_mean

__all__ = ["CUSTOM_OPS", "PASSES", "Grammar", "Policy", "PolicyList"]

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_SIGNED = re.compile(r"(?P<sign>[+-])(?P<name>[^{}]*)(?:\{(?P<options>.*)\})?", re.DOTALL)
_CLOSING = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True)
class Grammar:
    """Which base words a list accepts, and whether its names accept ``{option=value}``."""

    field: str
    bases: tuple[str, ...]
    options: bool


CUSTOM_OPS = Grammar("custom_ops", ("all", "none"), options=False)
PASSES = Grammar("passes", ("default", "all", "none"), options=True)


@dataclass(frozen=True)
class Policy:
    """What one list says: a base, the names switched on (with their options) and off.

    ``base`` is ``None`` while no word names one; a config resolves it, with the reason in
    ``base_why``. Any base other than ``all`` and ``none`` leaves a name to its own default.
    """

    list_name: str
    base: str | None = None
    enabled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    disabled: frozenset[str] = frozenset()
    base_why: str = ""

    def with_base(self, base: str, why: str) -> Policy:
        """This policy with its base resolved, and the reason for it."""
        return replace(self, base=base, base_why=why)

    def decide(self, name: str, default: bool) -> bool:
        """Whether ``name`` is on; ``default`` answers where neither a word nor the base does."""
        if name in self.enabled:
            return True
        if name in self.disabled or self.base == "none":
            return False
        return True if self.base == "all" else default

    def why(self, name: str, default: bool) -> str:
        """The reason for what ``decide`` answers: the word, the base or the default."""
        if name in self.enabled:
            return f"'+{name}' in {self.list_name}"
        if name in self.disabled:
            return f"'-{name}' in {self.list_name}"
        if self.base in ("all", "none"):
            return self.base_why
        state = "on" if default else "off"
        return f"{state} by default" + (f" ({self.base_why})" if self.base_why else "")

    @property
    def names(self) -> frozenset[str]:
        """Every name that a word mentions."""
        return self.disabled | self.enabled.keys()

    def key(self) -> list[Any]:
        """Plain data that is equal for lists that mean the same, whatever the order of words."""
        enabled = sorted((name, sorted(options.items())) for name, options in self.enabled.items())
        return [self.list_name, self.base, enabled, sorted(self.disabled)]


def parse(grammar: Grammar, words: Iterable[str]) -> Policy:
    """Parse a list of words, or raise a ``ConfigError`` that names the word and the remedy."""
    base: str | None = None
    enabled: dict[str, Mapping[str, Any]] = {}
    disabled: set[str] = set()
    for word in words:
        if not isinstance(word, str):
            raise ConfigError(
                f"{grammar.field} holds {word!r}, which is not a string",
                why="A policy is a list of words.",
                hint=f"Write a base ({_or(grammar.bases)}), '+name' or '-name'.",
            )
        if word in grammar.bases:
            if base not in (None, word):
                raise ConfigError(
                    f"{grammar.field} has two bases, {base!r} and {word!r}",
                    why="A base says what applies to every name that is not listed.",
                    hint="Keep one of them.",
                )
            base = word
            continue
        sign, name, options = _signed(grammar, word)
        if sign == "+":
            enabled[name] = _merged(grammar, name, enabled.get(name, {}), options)
        else:
            disabled.add(name)
        if name in enabled and name in disabled:
            raise ConfigError(
                f"{grammar.field} has both '+{name}' and '-{name}'",
                why="A name is either on or off.",
                hint="Keep one of them.",
            )
    why = f"base {base!r} in {grammar.field}" if base else ""
    return Policy(grammar.field, base, enabled, frozenset(disabled), why)


def _signed(grammar: Grammar, word: str) -> tuple[str, str, dict[str, Any]]:
    match = _SIGNED.fullmatch(word)
    if match is None:
        if word.startswith(("+", "-")):
            hint = "Write '+name', '-name' or '+name{option=value}', with nothing after it."
        else:
            hint = did_you_mean(word, (*grammar.bases, f"+{word}", f"-{word}"))
        raise ConfigError(
            f"{grammar.field} has {word!r}, which is neither a base nor a signed name",
            why=f"The bases are {_or(grammar.bases)}; a name carries a sign.",
            hint=hint,
        )
    sign, name, options = match["sign"], match["name"], match["options"]
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{grammar.field} has {word!r}: {name!r} is not a name",
            why="A name is letters, digits, '_' and '.', and starts with a letter or '_'.",
            hint=f"Write '{sign}name', without spaces.",
        )
    if options is None:
        return sign, name, {}
    if not grammar.options or sign == "-":
        raise ConfigError(
            f"{grammar.field} has {word!r}, which cannot take options",
            why="Options belong to passes that are switched on.",
            hint=f"Write '{sign}{name}'.",
        )
    return sign, name, _options(word, options)


def _merged(
    grammar: Grammar, name: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, Any]:
    for option in old.keys() & new.keys():
        if old[option] != new[option]:
            raise ConfigError(
                f"{grammar.field} sets {option!r} of '+{name}' to {old[option]!r} and "
                f"{new[option]!r}",
                why="An option has one value.",
                hint="Keep one of them.",
            )
    return {**old, **new}


def _options(word: str, text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in split(text) if text.strip() else []:
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not option.isidentifier() or not value or option in options:
            raise ConfigError(
                f"malformed option {part!r} in {word!r}",
                why="Options are 'name=value', separated by commas, each named once.",
                hint="Example: '+fuse_norm_quant{min_rows=16, layout=\"rows\"}'.",
            )
        options[option] = _value(word, value)
    return options


def _value(word: str, text: str) -> Any:
    """A TOML or Python literal; a bare word is a string."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if re.fullmatch(r"[A-Za-z_][\w.:-]*", text):
            return text
        raise ConfigError(
            f"malformed value {text!r} in {word!r}",
            why="It is not a number, a boolean, a quoted string, a list or a bare word.",
            hint="Quote it.",
        ) from None


def split(text: str) -> list[str]:
    """Split at commas that are outside quotes and brackets, and strip each piece."""
    pieces, start, quote = [], 0, ""
    open_brackets: list[str] = []
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _CLOSING:
            open_brackets.append(_CLOSING[char])
        elif open_brackets and char == open_brackets[-1]:
            open_brackets.pop()
        elif char == "," and not open_brackets:
            pieces.append(text[start:i].strip())
            start = i + 1
    if quote or open_brackets:
        raise ConfigError(
            f"{text!r} does not end",
            why=f"The closing {quote or open_brackets[-1]!r} is missing.",
            hint="Close what was opened.",
        )
    return [*pieces, text[start:].strip()]


def _or(words: Iterable[str]) -> str:
    return " or ".join(repr(word) for word in words)


class PolicyList(list[str]):
    """A list of policy words that is valid after every change, or unchanged."""

    def __init__(self, grammar: Grammar, words: Iterable[str] | str = ()) -> None:
        super().__init__(_words(grammar, words))
        self.grammar = grammar
        self.policy = parse(grammar, self)

    def _change(self, change: Callable[[list[str]], T]) -> T:
        words = list(self)
        result = change(words)
        self.policy = parse(self.grammar, words)
        super().__setitem__(slice(None), words)
        return result

    def append(self, word: str) -> None:
        self._change(lambda words: words.append(word))

    def extend(self, more: Iterable[str]) -> None:
        self._change(lambda words: words.extend(_words(self.grammar, more)))

    def insert(self, index: SupportsIndex, word: str) -> None:
        self._change(lambda words: words.insert(index, word))

    def pop(self, index: SupportsIndex = -1) -> str:
        return self._change(lambda words: words.pop(index))

    def remove(self, word: str) -> None:
        self._change(lambda words: words.remove(word))

    def clear(self) -> None:
        self._change(lambda words: words.clear())

    def __setitem__(self, index: Any, value: Any) -> None:
        self._change(lambda words: words.__setitem__(index, value))

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        self._change(lambda words: words.__delitem__(index))

    def __iadd__(self, more: Iterable[str]) -> PolicyList:  # type: ignore[misc,override]
        self.extend(more)
        return self

    def __imul__(self, times: SupportsIndex) -> PolicyList:
        self._change(lambda words: words.__imul__(times))
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would fill the copy word by word before it knows its grammar.
        return PolicyList, (self.grammar, list(self))


def _words(grammar: Grammar, words: Iterable[str] | str) -> list[str]:
    if isinstance(words, str):
        return split(words) if words.strip() else []
    try:
        return list(words)
    except TypeError:
        raise ConfigError(
            f"{grammar.field} is {words!r}, which is not a list of words",
            why="A policy is a list, or one string with commas.",
            hint=f'Example: {grammar.field} = ["none", "+name"].',
        ) from None
