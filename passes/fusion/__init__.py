"""Fusions: a pattern of operations becomes one kernel call."""
