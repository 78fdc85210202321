"""Plain-data records of what was decided and done, and how they are shown."""

from .notes import Note, note, notes

__all__ = ["Note", "note", "notes"]
