"""The backend that executes `TritonPythonModel` classes."""

from __future__ import annotations

import asyncio
import contextlib
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
        self._own_work: list[WorkQueue] = []  # of each instance, where requests are for a certain one
        self._instances: list[ModelInstance] = []

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        """Let the model's `auto_complete_config` fill in tensors and batching."""
        try:
            model_class = load_model_class(version_directory / config.default_model_filename, config.name)
            auto_complete = getattr(model_class, "auto_complete_config", None)
            if auto_complete is not None:
                model_config.complete(config, auto_complete)
            forget_model_class(model_class)
        except ServerError:
            raise
        except Exception as error:
            logger.debug("auto_complete_config of '%s' failed", config.name, exc_info=error)
            raise InvalidArgument(_text(error)) from None

    async def load(self) -> None:
        """Start the instances; all of them must initialize."""
        self._instances = self._make_instances()
        for instance in self._instances:
            instance.start()
        results = await asyncio.gather(
            *(asyncio.wrap_future(instance.started) for instance in self._instances), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                logger.error("model '%s' failed to initialize", self.context.name, exc_info=result)
                raise InternalError(_text(result))

    def submit(self, request: ResponseStream) -> None:
        """Queue the request for the first instance that is free."""
        if not self.ready():
            raise Unavailable(f"no instance of model '{self.context.name}' is alive")
        self._work.put(Work([request]))
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

        work = self._work if instance is None else self._own_work[instance]
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

    def ready(self) -> bool:
        """Whether at least one thread is there to execute."""
        return any(instance.alive for instance in self._instances)

    def _make_instances(self) -> list[ModelInstance]:
        context = self.context
        path = context.version_directory / context.config.default_model_filename
        kinds = config_to_dict(context.config)["instance_group"]
        text = config_to_json(context.config)
        decoupled = bool(context.config.model_transaction_policy.decoupled)
        outputs = {
            t["name"]: DataType.from_config(t["data_type"]) for t in config_to_dict(context.config)["output"]
        }
        sequences = config_to_dict(context.config).get("sequence_batching")
        states = {
            t["output_name"]: DataType.from_config(t["data_type"])
            for t in (sequences["state"] if sequences is not None else ())
        }
        access = ServerAccess(context.core, asyncio.get_running_loop())
        instances = []
        for group in kinds:
            for index in range(group["count"]):
                name = f"{group['name']}_{index}"
                args = {
                    "model_config": text,
                    "model_instance_kind": group["kind"].removeprefix("KIND_"),
                    "model_instance_name": name,
                    "model_instance_device_id": str(group["gpus"][0] if group["gpus"] else 0),
                    "model_repository": str(context.directory),
                    "model_version": context.version,
                    "model_name": context.name,
                }
                link = ModelOutputs(
                    asyncio.get_running_loop(), name, decoupled, outputs | states, tuple(states)
                )
                work = self._work
                if sequences is not None:
                    work = WorkQueue()
                    self._own_work.append(work)
                instances.append(ModelInstance(path, args, link, work, access))
        return instances


def _text(error: BaseException) -> str:
    return (
        str(error) if type(error).__name__ == "TritonModelException" else f"{type(error).__name__}: {error}"
    )
