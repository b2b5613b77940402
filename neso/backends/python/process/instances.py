"""The instances of a model that are processes, and the work that waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from neso.backends.python.instance import Work
from neso.backends.python.instances import Instances, Rescheduler
from neso.backends.python.local_server import LocalServer
from neso.backends.python.model_description import ModelDescription
from neso.backends.python.process.environment import find_interpreter
from neso.backends.python.process.instance import ProcessInstance, State
from neso.backends.python.process.running_model import tell_free
from neso.backends.python.settings import PythonSettings
from neso.server.errors import Unavailable
from neso.server.inference_response import ResponseStream

AHEAD = 2
"""Works that the only instance of a model gets at once. With several, the next one is for whichever is free first."""


class ProcessInstances(Instances):
    """Work waits here until an instance is idle: what a process was not given, its death does not touch."""

    def __init__(
        self,
        description: ModelDescription,
        settings: PythonSettings,
        server: LocalServer,
        reschedule: Rescheduler | None,
    ) -> None:
        self._description, self._settings = description, settings
        shared: deque[Work] = deque()
        depth = AHEAD if len(description.instances) == 1 else 1
        self._instances = [
            ProcessInstance(
                description,
                spec,
                settings,
                server,
                deque() if description.has_own_queue(spec) else shared,
                depth,
                self._dispatch,
                reschedule,
            )
            for spec in description.instances
        ]
        self._stopped = False

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """All is on the core's loop here."""
        function(*arguments)

    async def start(self) -> None:
        interpreter = await asyncio.to_thread(
            find_interpreter, self._settings.environment, self._description.directory
        )
        starts = [instance.start(interpreter) for instance in self._instances]
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def put(self, work: Work, instance: int | None = None) -> None:
        takers = self._instances if instance is None else [self._instances[instance]]
        if self._stopped or all(taker.state is State.DOWN for taker in takers):
            raise Unavailable(
                f"no instance of model '{self._description.name}' is alive. {takers[0].reason}".rstrip()
            )
        takers[0].queue.append(work)
        self._dispatch()

    def ready(self) -> bool:
        return any(instance.state is State.UP for instance in self._instances)

    async def check_ready(self) -> bool:
        """Instances that are being started again are left out."""
        checks = [instance.check_ready() for instance in self._instances if instance.state is State.UP]
        return all(await asyncio.gather(*checks))

    async def stop(self) -> None:
        self._stopped = True
        self._fail_waiting()
        await asyncio.gather(*(instance.stop() for instance in self._instances))
        self._fail_waiting()  # what they gave back

    def _dispatch(self) -> None:
        if self._stopped:
            return
        for instance in self._instances:
            instance.take()
            if instance.state is State.DOWN and (instance.has_own_queue or self._all_down()):
                _fail(
                    instance.queue,
                    f"no instance of model '{self._description.name}' is alive. {instance.reason}",
                )

    def _fail_waiting(self) -> None:
        for instance in self._instances:
            _fail(instance.queue, f"model '{self._description.name}' is unloaded")

    def _all_down(self) -> bool:
        return all(instance.state is State.DOWN for instance in self._instances)


def _fail(queue: deque[Work], message: str) -> None:
    while queue:
        work = queue.popleft()
        for stream in cast("list[ResponseStream]", work.streams):
            stream.fail(Unavailable(message))
        tell_free(work)
