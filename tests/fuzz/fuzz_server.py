"""A core with HTTP and gRPC frontends on a thread, which records unexpected log messages."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from repository_builder import REPEAT, REPEAT_TENSORS, RepositoryBuilder

from neso.frontends.frontend_options import GrpcOptions, HttpOptions
from neso.frontends.kserve.grpc_frontend import KServeGrpc
from neso.frontends.kserve.http_frontend import KServeHttp
from neso.server.core import Core
from neso.server.options import ModelControlMode, ServerOptions

Result = TypeVar("Result")

TYPES = {
    "BOOL": "TYPE_BOOL",
    "UINT8": "TYPE_UINT8",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "UINT64": "TYPE_UINT64",
    "FP16": "TYPE_FP16",
    "FP32": "TYPE_FP32",
    "FP64": "TYPE_FP64",
    "BF16": "TYPE_BF16",
    "BYTES": "TYPE_STRING",
}

ECHO = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)

    def execute(self, requests):
        if not self.decoupled:
            return [self.answer(request) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            sender.send(self.answer(request), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def answer(self, request):
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUT" + t.name().removeprefix("IN"), t.as_numpy()) for t in request.inputs()]
        )
"""

EVERY_TYPE = "".join(
    f'input {{ name: "IN_{name}" data_type: {config} dims: [ -1 ] optional: true }}\n'
    f'output {{ name: "OUT_{name}" data_type: {config} dims: [ -1 ] }}\n'
    for name, config in TYPES.items()
)
BATCHED = """
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 500 default_queue_policy { allow_timeout_override: true } }
input { name: "IN" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1, 2 ] }
"""
SEQUENCE = """
max_batch_size: 4
sequence_batching { max_sequence_idle_microseconds: 200000 }
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
TEXT = """
input { name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "STREAM" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
output { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }
"""
TEXT_CODE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", r.inputs()[0].as_numpy())]) for r in requests
        ]
"""
PIPELINE = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1, 2 ] }
max_batch_size: 8
ensemble_scheduling { step [ {
  model_name: "batched" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }
} ] }
"""

MODELS = ("echo", "batched", "sequence", "text", "repeat", "pipeline")


class ErrorCollector(logging.Handler):
    """Collects log records with an exception or level ERROR; none are expected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


class FuzzServer:
    """A server with models that respond to every valid request."""

    def __init__(self, folder: Path) -> None:
        self.repository = RepositoryBuilder(folder / "models")
        self.repository.add("echo", ECHO, EVERY_TYPE)
        self.repository.add("batched", ECHO, BATCHED)
        self.repository.add("sequence", ECHO, SEQUENCE)
        self.repository.add("text", TEXT_CODE, TEXT)
        self.repository.add("repeat", REPEAT, REPEAT_TENSORS)
        pipeline = self.repository.add("pipeline")
        (pipeline / "config.pbtxt").write_text(PIPELINE)
        self.core = Core(
            ServerOptions(
                model_repository=(self.repository.path,),
                model_control_mode=ModelControlMode.EXPLICIT,
                startup_models=MODELS,
                allow_client_shm=True,
                unload_timeout=300.0,  # longer than any test's timeout
                exit_timeout=5.0,
            )
        )
        self.complaints = ErrorCollector()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._idle_tasks = 0

    def __enter__(self) -> FuzzServer:
        for name in ("neso", "asyncio", "grpc"):
            logging.getLogger(name).addHandler(self.complaints)
        self._thread.start()
        self.call(self._start())
        return self

    def __exit__(self, *exception: object) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()
        for name in ("neso", "asyncio", "grpc"):
            logging.getLogger(name).removeHandler(self.complaints)

    def call(self, work: Coroutine[Any, Any, Result], timeout: float = 90.0) -> Result:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def check_sane(self) -> None:
        """Check that the server is live, serves a valid request and has logged no errors."""
        found, self.complaints.found = self.complaints.found, []
        assert not found, "\n".join(found)
        self.call(self._good_request(), 60)

    def check_idle(self) -> None:
        """Check that no requests and tasks remain after closing the connections."""
        deadline = time.monotonic() + 60
        while (left := self.call(self._unreleased())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, left

    async def _start(self) -> None:
        await self.core.start()
        assert self.core.ready(), self.core.repository_index()
        self.http = KServeHttp(self.core, HttpOptions("127.0.0.1", 0, max_input_size=1 << 20))
        self.grpc = KServeGrpc(self.core, GrpcOptions("127.0.0.1", 0))
        await self.http.start()
        await self.grpc.start()
        await self._good_request()
        await asyncio.sleep(0.1)
        self._idle_tasks = len(asyncio.all_tasks())

    async def _stop(self) -> None:
        await self.http.stop(1.0)
        await self.grpc.stop(1.0)
        await self.core.stop()

    async def _good_request(self) -> None:
        import numpy as np
        from core_requests import send_request

        array = np.ones(3, np.float32)
        (response,) = [r async for r in send_request(self.core.model("echo"), IN_FP32=array)]
        assert response.error is None and (response.output("OUT_FP32").array == array).all()

    async def _unreleased(self) -> list[str]:
        left = [
            f"{model.name}: {model.in_flight_count} requests"
            for model in self.core.models()
            if model.in_flight_count
        ]
        tasks = asyncio.all_tasks()
        if len(tasks) > self._idle_tasks:
            left += [repr(task) for task in tasks]
        return left
