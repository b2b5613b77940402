"""The trace and logging extensions: settings that are read and changed while the server runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neso.frontends.kserve_http.json_body import read_object
from neso.frontends.kserve_http.parameters import read_bool, read_string, read_unsigned
from neso.frontends.transport.http1 import Request, Response, json_response
from neso.server.core import Core
from neso.server.errors import InvalidArgument


class SettingEndpoints:
    """`GET` and `POST` of `/v2/trace/setting`, `/v2/models/{model}/trace/setting` and `/v2/logging`.

    All of them answer with the settings as they are then.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    def trace(self, request: Request) -> Response:
        """The global settings, or a model's."""
        return json_response(self._core.trace_settings(request.params.get("model", "")))

    def update_trace(self, request: Request) -> Response:
        """Change trace settings; null clears one."""
        values = {name: _texts(name, value) for name, value in read_object(request.body).items()}
        return json_response(self._core.trace_settings(request.params.get("model", ""), values))

    def log(self, request: Request) -> Response:
        """The settings of the log."""
        return json_response(self._core.log.settings())

    def update_log(self, request: Request) -> Response:
        """Change settings of the log; null leaves one as it is."""
        document = read_object(request.body)
        values = {
            name: _LOG_VALUES.get(name, _any)(name, value)
            for name, value in document.items()
            if value is not None
        }
        self._core.log.update(values)
        return json_response(self._core.log.settings())


def _texts(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if name == "trace_level":
        if type(value) is not list:
            raise InvalidArgument(f"Unable to parse '{name}': attempt to access JSON non-array as array")
        return [read_string(name, member) for member in value]
    # What cannot be changed is refused for that, whatever its form.
    return [read_string(name, value)] if name != "trace_file" else []


def _any(name: str, value: Any) -> Any:
    return value


_LOG_VALUES: dict[str, Callable[[str, Any], Any]] = {
    "log_info": read_bool,
    "log_warning": read_bool,
    "log_error": read_bool,
    "log_verbose_level": read_unsigned,
    "log_format": read_string,
}
