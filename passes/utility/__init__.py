"""Passes that simplify a graph without a kernel."""
