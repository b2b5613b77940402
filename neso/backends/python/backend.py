"""The backend that executes `TritonPythonModel` classes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format  # type: ignore[import-untyped]

from neso.backends.python.description import ModelDescription, PythonSettings
from neso.backends.python.errors import describe
from neso.backends.python.local_server import LocalServer
from neso.backends.python.model_instance import Work
from neso.backends.python.model_module import forget_model_class, load_model_class
from neso.backends.python.pb_utils import complete_config
from neso.backends.python.process.process_instances import ProcessInstances
from neso.backends.python.process.spawn import complete_in_process
from neso.backends.python.thread_instances import Instances, ThreadInstances
from neso.server.backend import Backend
from neso.server.config.model_config import config_to_dict
from neso.server.errors import InvalidArgument, ServerError, Unavailable
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
        description = ModelDescription.of(context, context.config)
        access = LocalServer(context.core, asyncio.get_running_loop())
        reschedule = self._reschedule if description.iterative else None
        self._instances: Instances = (
            ProcessInstances(description, settings, access, reschedule)
            if settings.in_process
            else ThreadInstances(description, access, reschedule)
        )

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Let the model's `auto_complete_config` fill in tensors and batching."""
        settings = PythonSettings.of(config, backend_config)
        auto_complete(config, directory, version_directory / config.default_model_filename, settings)

    async def load(self) -> None:
        """Start the instances; all of them must initialize."""
        await self._instances.start()

    async def update_instances(self, config: Any) -> bool:
        """Start more instances, or let some end when they are free; only counts may change.

        Instances take from one queue, so which ones end is open: with several groups none may.
        """
        before, after = list(self.context.config.instance_group), list(config.instance_group)
        own = self.context.assigns_instances or any(group.passive for group in before)
        if own or not self.ready() or not _differ_in_counts_only(before, after):
            return False
        growth = [new.count - old.count for old, new in zip(before, after, strict=True)]
        if min(growth) < 0 and len(growth) > 1:
            return False
        if not await self._instances.update(ModelDescription.of(self.context, config), growth):
            return False
        for old, new in zip(before, after, strict=True):
            old.count = new.count
        return True

    def submit(self, request: ResponseStream) -> None:
        """Queue the request for the first instance that is free; where the scheduler says which, for the first."""
        self._instances.put(Work([request]), 0 if self.context.assigns_instances else None)
        request.fail_if_cancelled_while_waiting()

    def execute(
        self, batch: list[ResponseStream], done: Callable[[], None], instance: int | None = None
    ) -> None:
        """Queue requests for the first instance that is free, or a certain one, as one call of `execute`."""
        post, statistics = self._instances.post, self.context.statistics
        size = sum(stream.batch_size for stream in batch)

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

    def _reschedule(self, stream: ResponseStream) -> None:
        if self.on_reschedule is not None:  # there is no request before there is a scheduler
            self.on_reschedule(stream)


def _differ_in_counts_only(before: list[Any], after: list[Any]) -> bool:
    """Whether instance groups are the same but for how many instances they have."""
    if len(before) != len(after):
        return False
    for old, new in zip(before, after, strict=True):
        same = type(old)()
        same.CopyFrom(old)
        same.count = new.count
        if same != new:
            return False
    return True


_COMPLETABLE = ("max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy")


def auto_complete(config: Any, directory: Path, path: Path, settings: PythonSettings) -> None:
    """Run the `auto_complete_config` of the model in `path` over a `ModelConfig` message, which is changed.

    Blocks. Raises `ServerError`.
    """
    values = config_to_dict(config)
    try:
        if settings.in_process:
            completed = complete_in_process(values, directory, path, settings)
        else:
            completed = _complete_here(values, path)
    except ServerError:
        raise
    except Exception as error:
        logger.debug("auto_complete_config of '%s' failed", config.name, exc_info=error)
        raise InvalidArgument(describe(error)) from None
    _apply_completed(config, completed)


def _complete_here(values: dict[str, Any], path: Path) -> dict[str, Any]:
    model_class = load_model_class(path, values["name"])
    try:
        return complete_config(values, model_class)
    finally:
        forget_model_class(model_class)


def _apply_completed(config: Any, completed: dict[str, Any]) -> None:
    values = {key: value for key, value in completed.items() if key in _COMPLETABLE}
    try:
        message = json_format.ParseDict(values, type(config)())
    except json_format.ParseError as error:
        raise InvalidArgument(
            f"auto_complete_config function in model '{config.name}' returned a bad configuration: {error}"
        ) from None
    for field in _COMPLETABLE:
        if field in values:
            config.ClearField(field)
    config.MergeFrom(message)
