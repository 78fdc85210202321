"""Passes, the plan that orders them, and the manager that runs it."""

from .base import FusionPass, Pass, PassContext, Phase
from .discovery import known_passes
from .fingerprint import fingerprint
from .lint import Finding, lint_rules
from .manager import Instrument, PassManager, changed_by
from .plan import Known, Plan, PlanEntry, build_plan

__all__ = [
    "Finding",
    "FusionPass",
    "Instrument",
    "Known",
    "Pass",
    "PassContext",
    "PassManager",
    "Phase",
    "Plan",
    "PlanEntry",
    "build_plan",
    "changed_by",
    "fingerprint",
    "known_passes",
    "lint_rules",
]
