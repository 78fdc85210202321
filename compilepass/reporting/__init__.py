"""Plain-data records of what was decided and done, and how they are shown."""

from .notes import Note, note, notes
from .records import GraphRecord, MatchRecord, NearMiss, OpRecord, PassRecord, RuleRecord
from .report import Report

__all__ = [
    "GraphRecord",
    "MatchRecord",
    "NearMiss",
    "Note",
    "OpRecord",
    "PassRecord",
    "Report",
    "RuleRecord",
    "note",
    "notes",
]
