"""The four clients of `tritonclient` with a common interface that records which methods are used."""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
from server_process import ServerProcess

CLASSES = ("InferenceServerClient", "InferInput", "InferRequestedOutput", "InferResult")


def public_methods(module: ModuleType, name: str) -> set[str]:
    """Return the public methods of one of the module's classes."""
    members = inspect.getmembers(getattr(module, name), callable)
    return {name for name, _ in members if not name.startswith("_")}


@dataclass
class ClientModule:
    """A client module: its protocol, and whether its methods are coroutines."""

    name: str
    module: ModuleType
    protocol: str
    asynchronous: bool
    used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def make(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Return an object of one of the module's classes that records the methods called on it."""
        return RecordingProxy(getattr(self.module, name)(*arguments, **options), self.used[name])

    def connect(self, server: ServerProcess, **options: Any) -> Any:
        return self.make("InferenceServerClient", server.address(self.protocol), **options)

    def input(self, name: str, array: Any, datatype: str, **options: Any) -> Any:
        """Return an input with its data."""
        tensor = self.make("InferInput", name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array, **options)
        return tensor

    def missing(self, name: str) -> set[str]:
        """Return the public methods of a class that were never called."""
        return public_methods(self.module, name) - self.used[name]


class RecordingProxy:
    """Forwards everything to the wrapped object and records the names."""

    def __init__(self, wrapped: Any, used: set[str]) -> None:
        object.__setattr__(self, "_RecordingProxy__wrapped", wrapped)
        object.__setattr__(self, "_RecordingProxy__used", used)

    def __getattr__(self, name: str) -> Any:
        # The library itself accesses these objects: a client calls private methods of inputs.
        if not name.startswith("_"):
            self.__used.add(name)
        return getattr(self.__wrapped, name)


def client_modules() -> list[ClientModule]:
    """Return all four client_modules."""
    return [
        ClientModule("http", http_client, "http", False),
        ClientModule("http.aio", http_aio, "http", True),
        ClientModule("grpc", grpc_client, "grpc", False),
        ClientModule("grpc.aio", grpc_aio, "grpc", True),
    ]


async def maybe_await(value: Any) -> Any:
    """Return the result of a method, awaited if it is a coroutine."""
    return await value if inspect.isawaitable(value) else value
