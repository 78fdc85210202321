"""Every error the toolkit raises, in one tree.

An error says *what* happened, *why*, and *what to do* about it, and its class says who must act:
the person who wrote the configuration, the author of an op, kernel, pass or plugin, or us.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CompilePassError",
    "ConfigError",
    "ExpectationError",
    "KernelError",
    "OpTypeError",
    "OpValueError",
    "PassError",
    "PatternError",
    "PlanError",
    "PlatformError",
    "RegistrationError",
    "did_you_mean",
]


class CompilePassError(Exception):
    """Base of all errors of the toolkit: ``what`` happened, ``why``, and a ``hint`` what to do."""

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        self.what, self.why, self.hint = what, why, hint
        super().__init__(what)

    def __str__(self) -> str:
        parts = [self.what]
        if self.why:
            parts.append(f"Why: {self.why}")
        if self.hint:
            parts.append(f"Hint: {self.hint}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.why, self.hint)


def _rebuild(cls: type[CompilePassError], what: str, why: str, hint: str) -> CompilePassError:
    return cls(what, why=why, hint=hint)


class ConfigError(CompilePassError, ValueError):
    """The configuration contradicts itself or names something that does not exist."""


class RegistrationError(CompilePassError, ValueError):
    """An op, layer, kernel or pass is registered twice, or under a bad name."""


class OpTypeError(CompilePassError, TypeError):
    """An op, layer or override is of the wrong kind or has the wrong signature."""


class OpValueError(CompilePassError, ValueError):
    """An op is called with sizes or dims that its declaration does not allow."""


class PlatformError(CompilePassError, RuntimeError):
    """A platform is unknown, ambiguous or unusable on this machine."""


class KernelError(CompilePassError, RuntimeError):
    """A kernel could not be built, loaded or run."""


class PatternError(CompilePassError, ValueError):
    """A rewrite rule cannot be used: its author must change the pattern or the replacement."""


class PlanError(CompilePassError, ValueError):
    """The passes cannot be ordered, or a pass that is required is missing."""


class PassError(CompilePassError, RuntimeError):
    """A pass raised, or did not keep an invariant (raised under ``strict=True`` only)."""


class ExpectationError(CompilePassError, AssertionError):
    """A pass matched another number of sites than ``expect`` says."""


def did_you_mean(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """``Did you mean 'a' or 'b'?`` for the nearest of ``known``, or a list of all of them."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=limit, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(repr(n) for n in near)}?"
    if not names:
        return "None is known."
    shown = ", ".join(names[:20])
    return f"Known: {shown}{', …' if len(names) > 20 else ''}."
