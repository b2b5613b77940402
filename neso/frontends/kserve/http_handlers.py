"""HTTP handlers of every operation except inference: decode the request, call the service, encode its result."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any

from neso.frontends.kserve.http_json import (
    read_bool,
    read_object,
    read_object_member,
    read_string,
    read_unsigned,
)
from neso.frontends.kserve.service import KServeService, parse_load_parameters
from neso.frontends.transport.http1 import Request, Response, error_response, json_response
from neso.server.config.model_config import config_to_dict
from neso.server.errors import InvalidArgument
from neso.server.metadata import IndexEntry, TensorMetadata
from neso.server.shared_memory.cuda import HANDLE_SIZE


class HttpHandlers:
    """One method per operation; `http_frontend.py` has the routes."""

    def __init__(self, service: KServeService) -> None:
        self._service = service

    # Health: 200, or 400 if not ready.

    def live(self, request: Request) -> Response:
        return _health(self._service.live())

    def ready(self, request: Request) -> Response:
        return _health(self._service.ready())

    async def model_ready(self, request: Request) -> Response:
        ready = await self._service.model_ready(*_model(request))
        return _health(True) if ready else error_response(400, "Model version not ready")

    # Metadata, configuration and statistics.

    def server_metadata(self, request: Request) -> Response:
        metadata = self._service.server_metadata()
        return json_response(
            {"name": metadata.name, "version": metadata.version, "extensions": metadata.extensions}
        )

    def model_metadata(self, request: Request) -> Response:
        metadata = self._service.model_metadata(*_model(request))
        return json_response(
            {
                "name": metadata.name,
                "versions": metadata.versions,
                "platform": metadata.platform,
                "inputs": [_tensor_metadata(tensor) for tensor in metadata.inputs],
                "outputs": [_tensor_metadata(tensor) for tensor in metadata.outputs],
            }
        )

    def model_config(self, request: Request) -> Response:
        return json_response(config_to_dict(self._service.model_config(*_model(request))))

    async def model_statistics(self, request: Request) -> Response:
        return json_response({"model_stats": await self._service.statistics(*_model(request))})

    async def statistics(self, request: Request) -> Response:
        return json_response({"model_stats": await self._service.statistics()})

    # Model repository.

    async def repository_index(self, request: Request) -> Response:
        repository = _repository(request)
        ready_only = _optional_object(request).get("ready", False)
        if type(ready_only) is not bool:
            raise InvalidArgument("Invalid value for 'ready': expected a boolean")
        return json_response(
            [_index_entry(entry) for entry in await self._service.repository_index(repository, ready_only)]
        )

    async def load_model(self, request: Request) -> Response:
        config, files = parse_load_parameters(_parameters(request), read_string, _read_file)
        await self._service.load_model(_repository(request), request.params["model"], config, files)
        return _empty()

    async def unload_model(self, request: Request) -> Response:
        dependents = read_bool("unload_dependents", _parameters(request).get("unload_dependents", False))
        await self._service.unload_model(_repository(request), request.params["model"], dependents)
        return _empty()

    # Shared memory.

    def system_shared_memory_status(self, request: Request) -> Response:
        regions = self._service.shared_memory.status(_region(request))
        return json_response(
            [
                {
                    "name": region.name,
                    "key": region.key,
                    "offset": region.offset,
                    "byte_size": region.byte_size,
                }
                for region in regions
            ]
        )

    async def register_system_shared_memory(self, request: Request) -> Response:
        self._service.shared_memory.check_enabled()
        body = _registration(request, "key", "byte_size")
        await self._service.change_shared_memory(
            "register",
            _region(request),
            read_string("key", body["key"]),
            read_unsigned("offset", body.get("offset", 0)),
            read_unsigned("byte_size", body["byte_size"]),
        )
        return _empty()

    async def unregister_system_shared_memory(self, request: Request) -> Response:
        await self._service.change_shared_memory("unregister", _region(request))
        return _empty()

    def cuda_shared_memory_status(self, request: Request) -> Response:
        regions = self._service.shared_memory.cuda_status(_region(request))
        return json_response(
            [
                {"name": region.name, "device_id": region.device_id, "byte_size": region.byte_size}
                for region in regions
            ]
        )

    async def register_cuda_shared_memory(self, request: Request) -> Response:
        self._service.shared_memory.check_enabled()
        body = _registration(request, "raw_handle", "device_id", "byte_size")
        await self._service.change_shared_memory(
            "register_cuda",
            _region(request),
            _read_cuda_handle(read_object_member("raw_handle", body["raw_handle"])),
            read_unsigned("device_id", body["device_id"]),
            read_unsigned("byte_size", body["byte_size"]),
        )
        return _empty()

    async def unregister_cuda_shared_memory(self, request: Request) -> Response:
        await self._service.change_shared_memory("unregister_cuda", _region(request))
        return _empty()

    # Trace and log settings. Every request returns the current settings.

    async def trace_settings(self, request: Request) -> Response:
        return json_response(await self._service.trace_settings(request.params.get("model", "")))

    async def update_trace_settings(self, request: Request) -> Response:
        """null clears a setting."""
        changes = {name: _trace_values(name, value) for name, value in read_object(request.body).items()}
        return json_response(await self._service.trace_settings(request.params.get("model", ""), changes))

    async def log_settings(self, request: Request) -> Response:
        return json_response(await self._service.log_settings())

    async def update_log_settings(self, request: Request) -> Response:
        """null leaves a setting unchanged."""
        changes = {
            name: _LOG_READERS[name](name, value) if name in _LOG_READERS else value
            for name, value in read_object(request.body).items()
            if value is not None
        }
        return json_response(await self._service.log_settings(changes))


def reject_unnamed_region(kind: str) -> Callable[[Request], Response]:
    """Reject a registration without a region name. `kind`: system or cuda."""

    def reject(request: Request) -> Response:
        raise InvalidArgument(f"'region name' is necessary to register {kind} shared memory region")

    return reject


_LOG_READERS: dict[str, Callable[[str, Any], Any]] = {
    "log_info": read_bool,
    "log_warning": read_bool,
    "log_error": read_bool,
    "log_verbose_level": read_unsigned,
    "log_format": read_string,
}


def _empty() -> Response:
    return Response(b"", 200, None)


def _health(healthy: bool) -> Response:
    return Response(b"", 200 if healthy else 400, None)


def _model(request: Request) -> tuple[str, str]:
    """Return name and version; the version is "" if the path has none."""
    return request.params["model"], request.params.get("version", "")


def _repository(request: Request) -> str:
    return request.params.get("repository", "")


def _region(request: Request) -> str:
    """Return the region's name, "" for all regions."""
    return request.params.get("region", "")


def _optional_object(request: Request) -> dict[str, Any]:
    """Parse the body as an object; empty without a body."""
    return read_object(request.body) if request.body else {}


def _parameters(request: Request) -> dict[str, Any]:
    return read_object_member("parameters", _optional_object(request).get("parameters", {}))


def _tensor_metadata(tensor: TensorMetadata) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def _index_entry(entry: IndexEntry) -> dict[str, str]:
    """Return an index entry without its empty members."""
    row = {"name": entry.name}
    if entry.version:
        row["version"] = entry.version
    if entry.state is not None:
        row["state"] = entry.state.value
    if entry.reason:
        row["reason"] = entry.reason
    return row


def _read_file(key: str, value: Any) -> bytes:
    try:
        return base64.b64decode(read_string(key, value), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"load parameter '{key}' is not valid base64") from None


def _registration(request: Request, *required: str) -> dict[str, Any]:
    """Parse the body of a registration and check its required members. Raises `InvalidArgument`."""
    body = read_object(request.body)
    for name in required:
        if name not in body:
            raise InvalidArgument(f"Shared memory register request has no '{name}' field")
    return body


def _read_cuda_handle(handle: dict[str, Any]) -> bytes:
    try:
        data = base64.b64decode(read_string("b64", handle.get("b64", "")), validate=True)
    except binascii.Error:
        data = b""
    if len(data) != HANDLE_SIZE:
        raise InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return data


def _trace_values(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if name == "trace_level":
        if type(value) is not list:
            raise InvalidArgument(f"Unable to parse '{name}': attempt to access JSON non-array as array")
        return [read_string(name, member) for member in value]
    # trace_file cannot be changed; the service rejects any value.
    return [read_string(name, value)] if name != "trace_file" else []
