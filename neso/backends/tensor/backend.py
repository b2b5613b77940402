"""`TensorBackend`: runs the instances of a `TensorModel` in threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from neso.backends.instance_threads import stop_threads
from neso.backends.tensor.execution import BatchWork, Executor, InstanceThread, Outcome, WorkQueue
from neso.backends.tensor.model import Instance, InstanceKind, TensorModel
from neso.server.backend import Backend, ModelContext
from neso.server.config.scheduling import instances_of
from neso.server.errors import Unavailable
from neso.server.inference_response import ResponseStream

UNLOAD_TIMEOUT = 30.0
"""Timeout for an instance to return from `run` and `unload` when its model is unloaded, in seconds."""


class TensorBackend(Backend):
    """Runs each instance of `model_class` in a thread. Concatenates the requests of a batch and splits its outputs."""

    batches = True
    concatenates = True
    model_class: type[TensorModel]

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._executor = Executor(context)
        self._work: WorkQueue = WorkQueue()
        self._threads: list[InstanceThread] = []

    def make_model(self, instance: Instance) -> TensorModel:
        """Create the model of an instance. Called in the instance's thread, for several instances concurrently."""
        return self.model_class(self.context, instance)

    async def load(self) -> None:
        """Start and load all instances."""
        for spec in instances_of(self.context.config):
            own_queue = self.context.assigns_instances or spec.passive
            work = WorkQueue() if own_queue else self._work
            instance = Instance(spec.name, InstanceKind(spec.kind), spec.device)
            make = partial(self.make_model, instance)
            self._threads.append(InstanceThread(instance.name, make, self._executor, work))
        for thread in self._threads:
            thread.start()
        results = await asyncio.gather(
            *(asyncio.wrap_future(thread.started) for thread in self._threads), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def submit(self, request: ResponseStream) -> None:
        """Queue a request for any instance, or for the first instance if the scheduler assigns instances."""
        if not self.ready():
            raise self._no_instance()
        loop = asyncio.get_running_loop()
        work = self._threads[0].work if self.context.assigns_instances else self._work
        work.put(BatchWork([request], lambda outcome: _post(loop, partial(_send_responses, outcome))))
        request.request.on_cancel(request.fail_if_queued)

    def execute(
        self, batch: list[ResponseStream], done: Callable[[], None], instance: int | None = None
    ) -> None:
        """Queue requests as one execution, for any instance or the given instance."""
        if not (self.ready() if instance is None else self._threads[instance].alive):
            for stream in batch:
                stream.fail(self._no_instance())
            done()
            return
        loop = asyncio.get_running_loop()
        work = self._work if instance is None else self._threads[instance].work
        work.put(BatchWork(batch, lambda outcome: _post(loop, partial(self._finish, outcome, done))))

    async def unload(self) -> None:
        """Execute queued requests, then end the threads."""
        await stop_threads(self._threads, self.context.name, UNLOAD_TIMEOUT)

    def ready(self) -> bool:
        """Return whether at least one instance can execute requests."""
        return any(thread.alive for thread in self._threads)

    def _no_instance(self) -> Unavailable:
        return Unavailable(f"no instance of model '{self.context.name}' is alive")

    def _finish(self, outcome: Outcome, done: Callable[[], None]) -> None:
        if outcome.timeline is not None:
            self.context.statistics.record_execution(outcome.size, outcome.timeline)
        try:
            _send_responses(outcome)
        finally:
            done()


def _send_responses(outcome: Outcome) -> None:
    for stream, response in outcome.responses:
        stream.send(response)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)
