"""The trace and logging extensions: settings that are read and changed while the server runs."""

from __future__ import annotations

from typing import Any

from grpc.aio import ServicerContext as Context
from tritonclient.grpc import service_pb2

from neso.frontends.kserve_grpc.calls import Calls, rpc
from neso.server.core import Core
from neso.server.errors import InvalidArgument

# What Triton says that it expects.
_LOG_TYPES = {
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
}


class SettingMethods:
    """The methods of the two extensions, for the servicer. Both answer with the settings as they are then."""

    core: Core
    calls: Calls

    @rpc
    async def TraceSetting(self, request: Any, context: Context) -> Any:
        values = {name: list(setting.value) for name, setting in request.settings.items()}
        reply = service_pb2.TraceSettingResponse()
        for name, value in self.core.trace_settings(request.model_name, values).items():
            reply.settings[name].value.extend([value] if isinstance(value, str) else value)
        return reply

    @rpc
    async def LogSettings(self, request: Any, context: Context) -> Any:
        self.core.log.update({name: _log_value(name, value) for name, value in request.settings.items()})
        reply = service_pb2.LogSettingsResponse()
        for name, value in self.core.log.settings().items():
            if isinstance(value, bool):
                reply.settings[name].bool_param = value
            elif isinstance(value, int):
                reply.settings[name].uint32_param = value
            else:
                reply.settings[name].string_param = value
        return reply


def _log_value(name: str, value: Any) -> Any:
    choice = value.WhichOneof("parameter_choice")
    expected, kind = _LOG_TYPES.get(name, (choice, ""))
    if choice != expected:
        raise InvalidArgument(f"expect {kind} for '{name}'")
    return getattr(value, choice) if choice else None
