"""Errors of `neso.perf`."""

from __future__ import annotations


class PerfError(Exception):
    """Invalid options or input files, or a server that cannot be measured. The message is for the user."""
