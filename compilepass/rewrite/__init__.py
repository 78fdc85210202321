"""The rewrite engine: find a pattern in an FX graph, prove the site safe, replace it, explain."""

from .engine import Engine, Rewritten, RuleResult, Session
from .equivalences import table as equivalences
from .reject import REJECT_CODES, Reject
from .rule import Input, Rule
from .site import Match

__all__ = [
    "REJECT_CODES",
    "Engine",
    "Input",
    "Match",
    "Reject",
    "Rewritten",
    "Rule",
    "RuleResult",
    "Session",
    "equivalences",
]
