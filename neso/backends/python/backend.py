"""The backend that executes `TritonPythonModel` classes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from neso.backends.python.auto_completion import auto_complete
from neso.backends.python.instance import Work
from neso.backends.python.instances import Instances, ThreadInstances
from neso.backends.python.local_server import LocalServer
from neso.backends.python.model_description import ModelDescription
from neso.backends.python.process.instances import ProcessInstances
from neso.backends.python.settings import PythonSettings
from neso.server.backend import Backend
from neso.server.errors import Unavailable
from neso.server.inference_response import ResponseStream
from neso.server.statistics import Timeline

logger = logging.getLogger(__name__)

READY_TIMEOUT = 5.0
"""Seconds that the `is_ready` functions of a model may take; one that takes longer is not ready."""


class PythonBackend(Backend):
    """Runs each instance of the model in a thread or a process of its own; the server's loop never waits for one."""

    batches = True

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        settings = PythonSettings.of(context.config, context.backend_config)
        description = ModelDescription.of(context)
        access = LocalServer(context.core, asyncio.get_running_loop())
        self._num_instances = len(description.instances)
        self._instances: Instances = (
            ProcessInstances(description, settings, access)
            if settings.in_process
            else ThreadInstances(description, access)
        )

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Let the model's `auto_complete_config` fill in tensors and batching."""
        settings = PythonSettings.of(config, backend_config)
        auto_complete(config, directory, version_directory / config.default_model_filename, settings)

    @property
    def num_instances(self) -> int:
        return self._num_instances

    async def load(self) -> None:
        """Start the instances; all of them must initialize."""
        await self._instances.start()

    def submit(self, request: ResponseStream) -> None:
        """Queue the request for the first instance that is free."""
        self._instances.put(Work([request]))
        request.fail_if_cancelled_while_waiting()

    def execute(
        self, batch: list[ResponseStream], done: Callable[[], None], instance: int | None = None
    ) -> None:
        """Queue requests for the first instance that is free, or a certain one, as one call of `execute`."""
        loop, statistics = asyncio.get_running_loop(), self.context.statistics
        size = sum(stream.batch_size for stream in batch)

        def post(call: Callable[..., None], *arguments: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(call, *arguments)

        def executed(timeline: Timeline) -> None:
            post(statistics.record_execution, size, timeline)

        try:
            self._instances.put(Work(batch, executed, lambda: post(done)), instance)
        except Unavailable as error:
            for stream in batch:
                stream.fail(error)
            done()

    async def unload(self) -> None:
        """End the instances, after `finalize`."""
        await self._instances.stop()

    def ready(self) -> bool:
        return self._instances.ready()

    async def check_ready(self) -> bool:
        """Ask the `is_ready` functions of the model's instances too."""
        if not self.ready():
            return False
        try:
            return await asyncio.wait_for(self._instances.check_ready(), READY_TIMEOUT)
        except asyncio.TimeoutError:
            logger.error("is_ready of model '%s' takes longer than %g s", self.context.name, READY_TIMEOUT)
            return False
