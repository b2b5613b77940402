"""The `parameters` of a configuration."""

from __future__ import annotations

from typing import Any


def string_parameter(config: Any, name: str, default: str = "") -> str:
    """The text of a parameter of a `ModelConfig` message; `default` where it is not set."""
    parameters = config.parameters
    # In a map of messages, looking a name up would put it in.
    return str(parameters[name].string_value) if name in parameters else default
