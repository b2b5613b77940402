"""The backend that executes `TritonPythonModel` classes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from google.protobuf import json_format  # type: ignore[import-untyped]

from neso.backends.python.description import ModelDescription, PythonSettings
from neso.backends.python.errors import describe
from neso.backends.python.local_server import LocalServer
from neso.backends.python.model_instance import WorkItem
from neso.backends.python.model_module import (
    ModelCode,
    forget_model_class,
    load_model_class,
    model_folder,
)
from neso.backends.python.pb_utils import complete_config
from neso.backends.python.process.process_instances import ProcessInstancePool
from neso.backends.python.process.spawn import complete_in_process
from neso.backends.python.thread_instances import InstancePool, ThreadInstancePool
from neso.server.backend import Backend
from neso.server.config.model_config import config_to_dict
from neso.server.errors import InvalidArgument, ServerError, Unavailable
from neso.server.import_turn import IMPORT_SECONDS, import_turn
from neso.server.inference_response import ResponseStream
from neso.server.statistics import Timeline

logger = logging.getLogger(__name__)


READY_TIMEOUT = 5.0
"""Timeout of a model's `is_ready` functions in seconds, after which the model is not ready."""


class PythonBackend(Backend):
    """Runs each instance of the model in a thread or a child process, without blocking the event loop.

    `model_file`: file with the class `TritonPythonModel` of a Python-based backend. None: it is in the folder of the
    model's version.
    """

    batches = True
    model_file: ClassVar[Path | None] = None

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        settings = PythonSettings.from_config(context.config, context.backend_config)
        description = self._describe(context.config)
        access = LocalServer(context)
        reschedule = self._reschedule if description.iterative else None
        self._instances: InstancePool = (
            ProcessInstancePool(description, settings, access, reschedule)
            if settings.use_process
            else ThreadInstancePool(description, access, reschedule)
        )

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Run the model's `auto_complete_config`."""
        settings = PythonSettings.from_config(config, backend_config)
        code = ModelCode.of(config, version_directory, cls.model_file)
        auto_complete(config, directory, code, settings)

    def _describe(self, config: Any) -> ModelDescription:
        code = ModelCode.of(config, self.context.version_directory, self.model_file)
        return ModelDescription.from_config(self.context, config, code)

    async def load(self) -> None:
        """Start and initialize all instances."""
        await self._instances.start()

    async def update_instances(self, config: Any) -> bool:
        """Start or end instances without a reload, if only the counts of instance groups changed.

        Groups on several GPUs need a reload: names are assigned device by device, so a different count moves names
        to other devices.
        """
        before, after = list(self.context.config.instance_group), list(config.instance_group)
        own_queues = self.context.assigns_instances or any(group.passive for group in before)
        if own_queues or not self.ready() or not _differ_in_counts_only(before, after):
            return False
        description = self._describe(config)
        if any(len(spec.group.gpus) > 1 for spec in description.instances):
            return False
        growth = [new.count - old.count for old, new in zip(before, after, strict=True)]
        if not await self._instances.update(description, growth):
            return False
        for old, new in zip(before, after, strict=True):
            old.count = new.count
        return True

    def submit(self, request: ResponseStream) -> None:
        """Queue a request for any instance, or for the first instance if the scheduler assigns instances."""
        self._instances.put(WorkItem([request]), 0 if self.context.assigns_instances else None)
        request.request.on_cancel(request.fail_if_queued)

    def execute(
        self, batch: list[ResponseStream], done: Callable[[], None], instance: int | None = None
    ) -> None:
        """Queue requests as one call of `execute`, for any instance or the given instance."""
        post, statistics = self._instances.post, self.context.statistics
        size = sum(stream.batch_size for stream in batch)

        def executed(timeline: Timeline) -> None:
            post(statistics.record_execution, size, timeline)

        try:
            self._instances.put(WorkItem(batch, executed, lambda: post(done)), instance)
        except Unavailable as error:
            for stream in batch:
                stream.fail(error)
            done()

    async def unload(self) -> None:
        """Run `finalize` and end the instances."""
        await self._instances.stop()

    def ready(self) -> bool:
        return self._instances.ready()

    async def check_ready(self) -> bool:
        """Return whether the instances are running and their `is_ready` functions return true."""
        if not self.ready():
            return False
        try:
            return await asyncio.wait_for(self._instances.check_ready(), READY_TIMEOUT)
        except asyncio.TimeoutError:
            logger.error("is_ready of model '%s' takes longer than %g s", self.context.name, READY_TIMEOUT)
            return False

    def _reschedule(self, stream: ResponseStream) -> None:
        if self.on_reschedule is not None:  # `on_reschedule` is set before the first request
            self.on_reschedule(stream)


def _differ_in_counts_only(before: list[Any], after: list[Any]) -> bool:
    """Return whether the instance groups are equal except for `count`."""
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


def auto_complete(config: Any, directory: Path, code: ModelCode, settings: PythonSettings) -> None:
    """Update a `ModelConfig` message with the model's `auto_complete_config`. Blocks. Raises `ServerError`."""
    values = config_to_dict(config)
    try:
        if settings.use_process:
            completed = complete_in_process(values, directory, code, settings)
        else:
            completed = _complete_in_thread(values, code)
    except ServerError:
        raise
    except Exception as error:
        logger.debug("auto_complete_config of '%s' failed", config.name, exc_info=error)
        raise InvalidArgument(describe(error)) from None
    _apply_completed(config, completed)


def _complete_in_thread(values: dict[str, Any], code: ModelCode) -> dict[str, Any]:
    with import_turn.held(IMPORT_SECONDS):
        model_class = load_model_class(code, values["name"])
    try:
        with model_folder(code.folder):
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
