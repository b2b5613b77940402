"""The shared memory extensions: status, register, unregister; and tensors in regions."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from neso.frontends.kserve_http.json_body import read_object
from neso.frontends.kserve_http.parameters import read_object_member, read_string, read_unsigned
from neso.frontends.transport.http1 import Handler, Request, Response, json_response
from neso.server.errors import InvalidArgument
from neso.server.shared_memory.cuda import HANDLE_SIZE
from neso.server.shared_memory.regions import BYTE_SIZE, OFFSET, REGION, SharedMemory, SharedMemoryWindow


class SharedMemoryEndpoints:
    """`/v2/systemsharedmemory[/region/{region}]/{status|register|unregister}`, and cudasharedmemory likewise."""

    def __init__(self, shared_memory: SharedMemory) -> None:
        self._shared_memory = shared_memory

    def routes(self) -> Iterator[tuple[str, str, Handler]]:
        """Method, pattern and handler of each."""
        for kind, status, register, unregister in (
            ("system", self.status, self.register, self.unregister),
            ("cuda", self.cuda_status, self.cuda_register, self.cuda_unregister),
        ):
            region = f"/v2/{kind}sharedmemory/region/{{region}}"
            yield "POST", f"{region}/register", register
            yield "POST", f"/v2/{kind}sharedmemory/register", _nameless(kind)
            for prefix in (f"/v2/{kind}sharedmemory", region):
                yield "GET", f"{prefix}/status", status
                yield "POST", f"{prefix}/unregister", unregister

    def status(self, request: Request) -> Response:
        regions = self._shared_memory.status(_region(request))
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

    def register(self, request: Request) -> Response:
        self._shared_memory.check_enabled()
        name, body = _registration(request, "key", "byte_size")
        self._shared_memory.register(
            name,
            read_string("key", body["key"]),
            read_unsigned("offset", body.get("offset", 0)),
            read_unsigned("byte_size", body["byte_size"]),
        )
        return Response(b"", 200, None)

    def unregister(self, request: Request) -> Response:
        self._shared_memory.unregister(_region(request))
        return Response(b"", 200, None)

    def cuda_status(self, request: Request) -> Response:
        regions = self._shared_memory.cuda_status(_region(request))
        return json_response(
            [
                {"name": region.name, "device_id": region.device_id, "byte_size": region.byte_size}
                for region in regions
            ]
        )

    def cuda_register(self, request: Request) -> Response:
        self._shared_memory.check_enabled()
        name, body = _registration(request, "raw_handle", "device_id", "byte_size")
        self._shared_memory.register_cuda(
            name,
            _read_handle(read_object_member("raw_handle", body["raw_handle"])),
            read_unsigned("device_id", body["device_id"]),
            read_unsigned("byte_size", body["byte_size"]),
        )
        return Response(b"", 200, None)

    def cuda_unregister(self, request: Request) -> Response:
        self._shared_memory.unregister_cuda(_region(request))
        return Response(b"", 200, None)


def read_window(
    tensor: str, parameters: dict[str, Any], shared_memory: SharedMemory
) -> SharedMemoryWindow | None:
    """Where in shared memory a tensor is by its parameters, None if it is not. Raises `ServerError`."""
    if REGION not in parameters:
        return None
    shared_memory.check_enabled()
    if BYTE_SIZE not in parameters:
        raise InvalidArgument(f"'{BYTE_SIZE}' is missing, '{tensor}' is in shared memory")
    return shared_memory.window(
        read_string(REGION, parameters[REGION]),
        read_unsigned(OFFSET, parameters.get(OFFSET, 0)),
        read_unsigned(BYTE_SIZE, parameters[BYTE_SIZE]),
    )


def _region(request: Request) -> str:
    """The region's name, "" for all."""
    return request.params.get("region", "")


def _registration(request: Request, *fields: str) -> tuple[str, dict[str, Any]]:
    """The region's name and the body, which has these fields. Raises `InvalidArgument`."""
    name, body = _region(request), read_object(request.body)
    for field in fields:
        if field not in body:
            raise InvalidArgument(f"Shared memory register request has no '{field}' field")
    return name, body


def _read_handle(handle: dict[str, Any]) -> bytes:
    try:
        data = base64.b64decode(read_string("b64", handle.get("b64", "")), validate=True)
    except binascii.Error:
        data = b""
    if len(data) != HANDLE_SIZE:
        raise InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return data


def _nameless(kind: str) -> Handler:
    """Refuses to register a region without a name."""

    def refuse(request: Request) -> Response:
        raise InvalidArgument(f"'region name' is necessary to register {kind} shared memory region")

    return refuse
