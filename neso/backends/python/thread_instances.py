"""Interface of instance pools, and instances of a Python model in threads of the server."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import Any

from neso.backends.instance_threads import stop_threads
from neso.backends.python.description import ModelDescription
from neso.backends.python.errors import describe
from neso.backends.python.model_instance import ModelInstance, WorkItem, WorkQueue
from neso.backends.python.server_access import LoopCalls, ServerAccess
from neso.server.config.scheduling import InstanceSpec
from neso.server.errors import InternalError, Unavailable
from neso.server.inference_response import InferenceResponse, ResponseStream

logger = logging.getLogger(__name__)

END_TIMEOUT = 30.0
"""Timeout for a model to return from `execute` and `finalize` when it is unloaded, in seconds."""


Rescheduler = Callable[[Any], None]
"""Reschedules the request of a stream. Called on the core's event loop."""


class InstancePool(ABC):
    """The instances of one loaded model. Used on the core's event loop.

    Work for any instance is executed by the first idle instance. Instances with `ModelDescription.has_own_queue` only
    execute work assigned to them.
    """

    @abstractmethod
    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the core's event loop, after all responses sent so far. Thread-safe."""

    @abstractmethod
    async def start(self) -> None:
        """Start and initialize all instances. Raises `ServerError`."""

    @abstractmethod
    def put(self, work: WorkItem, instance: int | None = None) -> None:
        """Queue a work item for any instance or the given instance. Raises `Unavailable` if none can execute it."""

    @abstractmethod
    async def update(self, description: ModelDescription, growth: list[int]) -> bool:
        """Change the instance count of each group by `growth`. Raises `ServerError`. Requires a shared queue.

        Returns False, without changes, if the model must be reloaded instead.
        """

    @abstractmethod
    def ready(self) -> bool:
        """Return whether at least one instance can execute requests."""

    @abstractmethod
    async def check_ready(self) -> bool:
        """Return whether `is_ready` of all running instances returns true."""

    @abstractmethod
    async def stop(self) -> None:
        """Run `finalize` of all instances and end them."""


def specs_to_add(
    description: ModelDescription, growth: list[int], used: Collection[str]
) -> list[InstanceSpec]:
    """Return specs with names that are not in `used`, one for each instance by which a group grows."""
    unused = [spec for spec in description.instances if spec.name not in used]
    groups = list(dict.fromkeys(spec.group.name for spec in description.instances))
    added: list[InstanceSpec] = []
    for name, count in zip(groups, growth, strict=True):
        added += [spec for spec in unused if spec.group.name == name][: max(count, 0)]
    return added


class ThreadInstancePool(InstancePool):
    """Runs each instance in a thread of the server."""

    def __init__(
        self, description: ModelDescription, access: ServerAccess, reschedule: Rescheduler | None
    ) -> None:
        self._name = description.name
        self._access = access
        self._shared_queue = WorkQueue()
        self._calls = LoopCalls(asyncio.get_running_loop())
        # Pass no bound methods of this object: the threads would keep it alive.
        self._respond = partial(_respond, self._calls)
        self._reschedule = None if reschedule is None else partial(self._calls.post, reschedule)
        self._threads = [self._make(description, spec) for spec in description.instances]
        self._target_count = len(self._threads)

    def _make(self, description: ModelDescription, spec: InstanceSpec) -> InstanceThread:
        instance = ModelInstance(
            description.code,
            description.args(spec),
            description.outputs(spec, self._respond, self._reschedule),
            WorkQueue() if description.has_own_queue(spec) else self._shared_queue,
            self._access,
        )
        return InstanceThread(instance)

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        self._calls.post(function, *arguments)

    async def start(self) -> None:
        await self._start(self._threads)

    async def update(self, description: ModelDescription, growth: list[int]) -> bool:
        """Change the instance counts. Instances share one queue, so that the first idle ones end, whatever their group.

        Therefore no group can shrink if there are several groups.
        """
        if min(growth) < 0 and len(growth) > 1:
            return False
        alive = [thread for thread in self._threads if thread.alive]
        if len(alive) > self._target_count:
            return False  # some instances are still draining; their names, and therefore the free names, are unknown
        used = {thread.instance.name for thread in alive}
        added = [self._make(description, spec) for spec in specs_to_add(description, growth, used)]
        self._threads = alive + added
        try:
            await self._start(added)
        except BaseException:
            for thread in added:
                if thread.instance.started.done() and thread.instance.started.exception() is None:
                    self._shared_queue.put(None)  # ends an arbitrary instance
            raise
        self._target_count += len(added)
        await self._end_instances(-min(*growth, 0))
        return True

    async def _end_instances(self, count: int) -> None:
        """End the instances that become idle first. Waits for their `finalize`, at most `END_TIMEOUT`."""
        for _ in range(count):
            self._shared_queue.put(None)
        self._target_count -= count
        running = {asyncio.wrap_future(thread.ended) for thread in self._threads if thread.alive}
        deadline = time.monotonic() + END_TIMEOUT
        while len(running) > self._target_count and (left := deadline - time.monotonic()) > 0:
            _, running = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)

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

    def put(self, work: WorkItem, instance: int | None = None) -> None:
        if not (self.ready() if instance is None else self._threads[instance].alive):
            raise Unavailable(f"no instance of model '{self._name}' is alive")
        (self._shared_queue if instance is None else self._threads[instance].work).put(work)

    def ready(self) -> bool:
        return any(thread.alive for thread in self._threads)

    async def check_ready(self) -> bool:
        results = [thread.instance.check_ready() for thread in self._threads if thread.alive]
        # Shielded: if this caller times out, the next caller can use the result.
        waiting = [asyncio.shield(asyncio.wrap_future(result)) for result in results]
        return all(await asyncio.gather(*waiting))

    async def stop(self) -> None:
        """Execute the queued requests, then end the instances."""
        await stop_threads(self._threads, self._name, END_TIMEOUT)


class InstanceThread:
    """A thread that runs one instance. `ended` is resolved when the thread ends."""

    def __init__(self, instance: ModelInstance) -> None:
        self.instance = instance
        self.work = instance.work
        self.ended: Future[None] = Future()
        # A daemon thread: a model that never returns from execute must not keep the server from exiting.
        self._thread = threading.Thread(target=self._run, name=f"model-{self.instance.name}", daemon=True)
        self.alive = False

    def start(self) -> None:
        self.alive = True
        self._thread.start()

    def _run(self) -> None:
        try:
            self.instance.run()
        finally:
            self.alive = False
            self.ended.set_result(None)


def _respond(calls: LoopCalls, stream: ResponseStream, response: InferenceResponse) -> None:
    stream.admit(response)
    calls.post(stream.send, response)
