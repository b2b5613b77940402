"""The backend around models that turn arrays into arrays."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

from neso.backends.tensor.execution import Executor, InstanceThread, Outcome, Work, WorkQueue
from neso.backends.tensor.model import Instance, InstanceKind, TensorModel
from neso.server.backend import Backend, ModelContext
from neso.server.config.scheduling import instances_of
from neso.server.errors import Unavailable
from neso.server.inference_response import ResponseStream

logger = logging.getLogger(__name__)

UNLOAD_TIMEOUT = 30.0
"""Seconds that an instance has to return from `run` and `unload` when its model is unloaded."""


class TensorBackend(Backend):
    """Runs each instance of `model_class` in a thread of its own; the server's loop never waits for one.

    To write a backend, write a `TensorModel`, name it as the `model_class` of a subclass of this, and register that
    subclass as an entry point of the group `neso.backends`. Batches are concatenated and split here.
    """

    batches = True
    concatenates = True
    model_class: type[TensorModel]

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._executor = Executor(context)
        self._work: WorkQueue = WorkQueue()
        self._threads: list[InstanceThread] = []

    def make_model(self, instance: Instance) -> TensorModel:
        """Called in the thread of the instance, several of them at the same time."""
        return self.model_class(self.context, instance)

    async def load(self) -> None:
        """Start the instances; all of them must load."""
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
        """Queue the request for the first instance that is free; where the scheduler says which, for the first."""
        if not self.ready():
            raise self._dead()
        loop = asyncio.get_running_loop()
        work = self._threads[0].work if self.context.assigns_instances else self._work
        work.put(Work([request], lambda outcome: _post(loop, partial(_answer, outcome))))
        request.fail_on_cancel_while_queued()

    def execute(
        self, batch: list[ResponseStream], done: Callable[[], None], instance: int | None = None
    ) -> None:
        """Queue requests as one execution, for the first instance that is free, or for a certain one."""
        if not (self.ready() if instance is None else self._threads[instance].alive):
            for stream in batch:
                stream.fail(self._dead())
            done()
            return
        loop = asyncio.get_running_loop()
        work = self._work if instance is None else self._threads[instance].work
        work.put(Work(batch, lambda outcome: _post(loop, partial(self._finish, outcome, done))))

    async def unload(self) -> None:
        """End the threads: requests that are queued are executed first."""
        running = [thread for thread in self._threads if thread.alive]
        for thread in running:
            thread.work.put(None)
        if not running:
            return
        ended = [asyncio.wrap_future(thread.ended) for thread in running]
        _, stuck = await asyncio.wait(ended, timeout=UNLOAD_TIMEOUT)
        if stuck:
            logger.error("%d instances of model '%s' do not end", len(stuck), self.context.name)

    def ready(self) -> bool:
        """Whether at least one thread is there to execute."""
        return any(thread.alive for thread in self._threads)

    def _dead(self) -> Unavailable:
        return Unavailable(f"no instance of model '{self.context.name}' is alive")

    def _finish(self, outcome: Outcome, done: Callable[[], None]) -> None:
        if outcome.timeline is not None:
            self.context.statistics.record_execution(outcome.size, outcome.timeline)
        try:
            _answer(outcome)
        finally:
            done()


def _answer(outcome: Outcome) -> None:
    for stream, response in outcome.responses:
        stream.send(response)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the server has ended
        loop.call_soon_threadsafe(call)
