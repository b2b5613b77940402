"""The instances of one loaded model: where its requests are executed."""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from neso.backends.python.errors import describe
from neso.backends.python.instance import ModelInstance, Work, WorkQueue
from neso.backends.python.model_description import ModelDescription
from neso.backends.python.response_sender import ModelOutputs
from neso.backends.python.server_access import ServerAccess
from neso.server.errors import InternalError, Unavailable
from neso.server.inference_response import InferenceResponse

logger = logging.getLogger(__name__)

END_TIMEOUT = 30.0
"""Seconds that a model has to return from `execute` and `finalize` when it is unloaded."""


class Instances(ABC):
    """Made and used on the core's event loop. Work for any instance goes to the first that is free.

    Where requests are for a certain instance (`ModelDescription.own_work`), each has a queue of its own.
    """

    @abstractmethod
    async def start(self) -> None:
        """Start them; all of them must initialize. Raises `ServerError`."""

    @abstractmethod
    def put(self, work: Work, instance: int | None = None) -> None:
        """Queue requests for one call of `execute`. Raises `Unavailable` if no instance will ever take them."""

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

    def __init__(self, description: ModelDescription, access: ServerAccess) -> None:
        self._name = description.name
        shared = WorkQueue()
        self._shared = shared
        self._threads = [
            InstanceThread(
                description.path,
                args,
                description.outputs(args["model_instance_name"], poster(asyncio.get_running_loop())),
                WorkQueue() if description.own_work else shared,
                access,
            )
            for args in description.instances
        ]

    async def start(self) -> None:
        for thread in self._threads:
            thread.start()
        results = await asyncio.gather(
            *(asyncio.wrap_future(thread.instance.started) for thread in self._threads),
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


def poster(loop: asyncio.AbstractEventLoop) -> Any:
    """How a thread answers: on the core's loop."""

    def post(stream: Any, response: InferenceResponse) -> None:
        try:
            loop.call_soon_threadsafe(stream.send, response)
        except RuntimeError:
            logger.debug("a response came after the server's end")

    return post
