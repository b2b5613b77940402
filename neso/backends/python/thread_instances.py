"""The instances of one loaded model: where its requests are executed."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from neso.backends.python.description import ModelDescription
from neso.backends.python.errors import describe
from neso.backends.python.model_instance import ModelInstance, Work, WorkQueue
from neso.backends.python.response import ModelOutputs
from neso.backends.python.server_access import LoopCalls, ServerAccess
from neso.server.config.scheduling import InstanceSpec
from neso.server.errors import InternalError, Unavailable
from neso.server.inference_response import InferenceResponse, ResponseStream

logger = logging.getLogger(__name__)

END_TIMEOUT = 30.0
"""Seconds that a model has to return from `execute` and `finalize` when it is unloaded."""


Rescheduler = Callable[[Any], None]
"""Has the request of a stream executed again, as an iterative sequence; called on the core's loop."""


class Instances(ABC):
    """Made and used on the core's event loop. Work for any instance goes to the first that is free.

    Where requests are for a certain instance (`ModelDescription.has_own_queue`), each has a queue of its own.
    """

    @abstractmethod
    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the core's loop, after the responses that were sent before; from any thread."""

    @abstractmethod
    async def start(self) -> None:
        """Start them; all of them must initialize. Raises `ServerError`."""

    @abstractmethod
    def put(self, work: Work, instance: int | None = None) -> None:
        """Queue requests for one call of `execute`. Raises `Unavailable` if no instance will ever take them."""

    async def update(self, description: ModelDescription, growth: list[int]) -> bool:
        """Have so many more or fewer instances of each group; False where that takes a load. Raises `ServerError`."""
        return False

    @abstractmethod
    def ready(self) -> bool:
        """Whether at least one instance is there to execute."""

    @abstractmethod
    async def check_ready(self) -> bool:
        """Whether the models' own `is_ready` functions agree, of all instances that are there."""

    @abstractmethod
    async def stop(self) -> None:
        """Let each run `finalize`, and end them."""


class ThreadInstances(Instances):
    """Each instance is a thread of the server."""

    def __init__(
        self,
        description: ModelDescription,
        access: ServerAccess,
        reschedule: Rescheduler | None,
    ) -> None:
        self._name = description.name
        self._access = access
        self._shared = WorkQueue()
        self._calls = LoopCalls(asyncio.get_running_loop())
        # Neither holds what holds the instances: with the last thread, all of the model is gone at once.
        self._respond = partial(_respond, self._calls)
        self._reschedule = None if reschedule is None else partial(self._calls.post, reschedule)
        self._threads = [self._make(description, spec) for spec in description.instances]
        self._wanted = len(self._threads)

    def _make(self, description: ModelDescription, spec: InstanceSpec) -> InstanceThread:
        return InstanceThread(
            description.path,
            description.args(spec),
            description.outputs(spec, self._respond, self._reschedule),
            WorkQueue() if description.has_own_queue(spec) else self._shared,
            self._access,
        )

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        self._calls.post(function, *arguments)

    async def start(self) -> None:
        await self._start(self._threads)

    async def update(self, description: ModelDescription, growth: list[int]) -> bool:
        alive = [thread for thread in self._threads if thread.alive]
        if len(alive) > self._wanted:
            return False  # some have yet to end, and which these are is open: so are the names that are free
        fresh = [self._make(description, spec) for spec in self._specs_to_add(description, growth)]
        self._threads = alive + fresh
        try:
            await self._start(fresh)
        except BaseException:
            for thread in fresh:
                if thread.instance.started.done() and thread.instance.started.exception() is None:
                    self._shared.put(None)  # one of them all ends
            raise
        self._wanted += len(fresh)
        for _ in range(-min(growth)):
            self._shared.put(None)
            self._wanted -= 1
        return True

    def _specs_to_add(self, description: ModelDescription, growth: list[int]) -> list[InstanceSpec]:
        """Instances whose names nobody has, as many of each group as it grows by."""
        taken = {thread.instance.name for thread in self._threads if thread.alive}
        free = [spec for spec in description.instances if spec.name not in taken]
        groups = list(dict.fromkeys(spec.group.name for spec in description.instances))
        added: list[InstanceSpec] = []
        for name, count in zip(groups, growth, strict=True):
            of_group = [spec for spec in free if spec.group.name == name]
            devices = len(of_group[0].group.gpus) or 1 if of_group else 1
            added += itertools.islice(of_group, max(count, 0) * devices)
        return added

    async def _start(self, threads: list[InstanceThread]) -> None:
        for thread in threads:
            thread.start()
        results = await asyncio.gather(
            *(asyncio.wrap_future(thread.instance.started) for thread in threads),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                logger.error("model '%s' failed to initialize", self._name, exc_info=result)
                raise InternalError(describe(result))

    def put(self, work: Work, instance: int | None = None) -> None:
        if not (self.ready() if instance is None else self._threads[instance].alive):
            raise Unavailable(f"no instance of model '{self._name}' is alive")
        (self._shared if instance is None else self._threads[instance].instance.work).put(work)

    def ready(self) -> bool:
        return any(thread.alive for thread in self._threads)

    async def check_ready(self) -> bool:
        answers = [thread.instance.check_ready() for thread in self._threads if thread.alive]
        # Shielded: an answer that comes too late for this caller may be in time for the next.
        waiting = [asyncio.shield(asyncio.wrap_future(answer)) for answer in answers]
        return all(await asyncio.gather(*waiting))

    async def stop(self) -> None:
        """Requests that are queued are executed first."""
        running = [thread for thread in self._threads if thread.alive]
        for thread in running:
            thread.instance.work.put(None)
        if not running:
            return
        ended = [asyncio.wrap_future(thread.ended) for thread in running]
        _, stuck = await asyncio.wait(ended, timeout=END_TIMEOUT)
        if stuck:
            logger.error("%d instances of model '%s' do not end", len(stuck), self._name)


class InstanceThread:
    """An instance that lives in a thread. `ended` tells when it is over."""

    def __init__(
        self, path: Path, args: dict[str, str], outputs: ModelOutputs, work: WorkQueue, access: ServerAccess
    ) -> None:
        self.instance = ModelInstance(path, args, outputs, work, access)
        self.ended: Future[None] = Future()
        # A daemon: a model that never returns from execute must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"model-{self.instance.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.instance.run()
        finally:
            self.ended.set_result(None)


def _respond(calls: LoopCalls, stream: ResponseStream, response: InferenceResponse) -> None:
    calls.post(stream.send, response)
