"""The backend that executes `TritonPythonModel` classes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from neso.backends.python import model_config
from neso.backends.python.instance import ModelInstance, Work, WorkQueue
from neso.backends.python.model_module import forget_model_class, load_model_class
from neso.backends.python.response_sender import ModelOutputs
from neso.backends.python.server_access import ServerAccess
from neso.server.backend import Backend
from neso.server.datatypes import DataType
from neso.server.errors import InternalError, InvalidArgument, ServerError, Unavailable
from neso.server.inference_response import ResponseStream
from neso.server.instances import InstanceSpec, instances_of
from neso.server.model_config import config_to_dict, config_to_json
from neso.server.statistics import Timeline

logger = logging.getLogger(__name__)

FINALIZE_TIMEOUT = 30.0
"""Seconds that a model has to return from `execute` and `finalize` when it is unloaded."""


class PythonBackend(Backend):
    """Runs each instance of the model in a thread of its own; the server's loop never waits for one."""

    batches = True

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._work: WorkQueue = WorkQueue()
        self._instances: list[ModelInstance] = []

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Let the model's `auto_complete_config` fill in tensors and batching."""
        try:
            model_class = load_model_class(version_directory / config.default_model_filename, config.name)
            try:
                auto_complete = getattr(model_class, "auto_complete_config", None)
                if auto_complete is not None:
                    model_config.complete(config, auto_complete)
            finally:
                forget_model_class(model_class)
        except ServerError:
            raise
        except Exception as error:
            logger.debug("auto_complete_config of '%s' failed", config.name, exc_info=error)
            raise InvalidArgument(_text(error)) from None

    async def load(self) -> None:
        """Start the instances; all of them must initialize."""
        config = self.context.config
        self._instances = self._make_instances(config, instances_of(config))
        await self._start(self._instances)

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
        fresh = self._make_instances(config, self._specs_to_add(config, growth))
        self._instances = [instance for instance in self._instances if instance.alive] + fresh
        try:
            await self._start(fresh)
        except BaseException:
            for instance in fresh:
                if instance.started.done() and instance.started.exception() is None:
                    self._work.put(None)  # one of them all ends
            raise
        for old, new in zip(before, after, strict=True):
            old.count = new.count
        for _ in range(-min(growth)):
            self._work.put(None)
        return True

    def _specs_to_add(self, config: Any, growth: list[int]) -> list[InstanceSpec]:
        """Instances whose names nobody has, as many of each group as it grows by."""
        taken = {instance.name for instance in self._instances if instance.alive}
        free = [spec for spec in instances_of(config) if spec.name not in taken]
        added: list[InstanceSpec] = []
        for group, count in zip(config.instance_group, growth, strict=True):
            devices = len(group.gpus) or 1
            of_group = (spec for spec in free if spec.group.name == group.name)
            added += itertools.islice(of_group, max(count, 0) * devices)
        return added

    async def _start(self, instances: list[ModelInstance]) -> None:
        for instance in instances:
            instance.start()
        results = await asyncio.gather(
            *(asyncio.wrap_future(instance.started) for instance in instances), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                logger.error("model '%s' failed to initialize", self.context.name, exc_info=result)
                raise InternalError(_text(result))

    def submit(self, request: ResponseStream) -> None:
        """Queue the request for the first instance that is free; where the scheduler says which, for the first."""
        if not self.ready():
            raise Unavailable(f"no instance of model '{self.context.name}' is alive")
        work = self._instances[0].work if self.context.assigns_instances else self._work
        work.put(Work([request]))
        request.fail_if_cancelled_while_waiting()

    def execute(
        self, batch: list[ResponseStream], done: Callable[[], None], instance: int | None = None
    ) -> None:
        """Queue requests for the first instance that is free, or a certain one, as one call of `execute`."""
        if not (self.ready() if instance is None else self._instances[instance].alive):
            for stream in batch:
                stream.fail(Unavailable(f"no instance of model '{self.context.name}' is alive"))
            done()
            return
        loop, statistics = asyncio.get_running_loop(), self.context.statistics
        size = sum(stream.batch_size for stream in batch)

        def post(call: Callable[..., None], *arguments: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(call, *arguments)

        def executed(timeline: Timeline) -> None:
            post(statistics.record_execution, size, timeline)

        work = self._work if instance is None else self._instances[instance].work
        work.put(Work(batch, executed, lambda: post(done)))

    async def unload(self) -> None:
        """End the threads: requests that are queued are executed first, then `finalize` runs."""
        running = [instance for instance in self._instances if instance.alive]
        for instance in running:
            instance.work.put(None)
        if not running:
            return
        ended = [asyncio.wrap_future(instance.ended) for instance in running]
        _, stuck = await asyncio.wait(ended, timeout=FINALIZE_TIMEOUT)
        if stuck:
            logger.error("%d instances of model '%s' do not end", len(stuck), self.context.name)

    def _reschedule(self, stream: ResponseStream) -> None:
        if self.on_reschedule is not None:  # there is no request before there is a scheduler
            self.on_reschedule(stream)

    def ready(self) -> bool:
        """Whether at least one thread is there to execute."""
        return any(instance.alive for instance in self._instances)

    def _make_instances(self, config: Any, specs: list[InstanceSpec]) -> list[ModelInstance]:
        context = self.context
        path = context.version_directory / config.default_model_filename
        text = config_to_json(config)
        decoupled = bool(config.model_transaction_policy.decoupled)
        outputs = {t["name"]: DataType.from_config(t["data_type"]) for t in config_to_dict(config)["output"]}
        sequences = config_to_dict(config).get("sequence_batching")
        states = {
            t["output_name"]: DataType.from_config(t["data_type"])
            for t in (sequences["state"] if sequences is not None else ())
        }
        access = ServerAccess(context.core, asyncio.get_running_loop())
        instances = []
        for spec in specs:
            args = {
                "model_config": text,
                "model_instance_kind": spec.kind,
                "model_instance_name": spec.name,
                "model_instance_device_id": str(spec.device),
                "model_repository": str(context.directory),
                "model_version": context.version,
                "model_name": context.name,
            }
            link = ModelOutputs(
                asyncio.get_running_loop(),
                spec.name,
                decoupled,
                outputs | states,
                tuple(states),
                self._reschedule if sequences is not None and sequences["iterative_sequence"] else None,
            )
            own = context.assigns_instances or spec.passive
            instances.append(ModelInstance(path, args, link, WorkQueue() if own else self._work, access))
        return instances


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


def _text(error: BaseException) -> str:
    return (
        str(error) if type(error).__name__ == "TritonModelException" else f"{type(error).__name__}: {error}"
    )
