"""Errors of an engine."""

from __future__ import annotations


class EngineError(Exception):
    """The engine could not be started, or could not execute a request. The message is for the user."""


class EngineBusy(EngineError):
    """The engine has no capacity for a request, or its queue timeout expired; it can be retried later."""


class EngineDead(EngineError):
    """The engine process has ended; requests fail until it is restarted. They can be retried later."""
