"""Instances of a model in child processes: queues of work, supervision and restarts."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, cast

from neso.backends.python.description import ModelDescription, PythonSettings
from neso.backends.python.local_server import LocalServer
from neso.backends.python.model_instance import WorkItem
from neso.backends.python.process.running_model import RunningModel
from neso.backends.python.process.spawn import Interpreter, find_interpreter
from neso.backends.python.thread_instances import END_TIMEOUT, InstancePool, Rescheduler, specs_to_add
from neso.backends.restarts import Restarts, restart_counter
from neso.server.config.scheduling import InstanceSpec
from neso.server.errors import Restarting, ServerError, Unavailable
from neso.server.inference_response import ResponseStream

logger = logging.getLogger(__name__)


PREFETCH_DEPTH = 2
"""Number of work items in the process of a model's only instance. Several instances have one item each."""


class ProcessInstancePool(InstancePool):
    """Queues work until an instance is idle, so that queued work is not lost when a process ends."""

    def __init__(
        self,
        description: ModelDescription,
        settings: PythonSettings,
        server: LocalServer,
        reschedule: Rescheduler | None,
    ) -> None:
        self._description, self._settings = description, settings
        self._server, self._reschedule = server, reschedule
        self._shared_queue: deque[WorkItem] = deque()
        self._instances = self._make(description, description.instances)
        self._ending: set[str] = set()
        self._stopped = False
        self._set_depth()

    def _make(self, description: ModelDescription, specs: list[InstanceSpec]) -> list[ProcessInstance]:
        return [
            ProcessInstance(
                description,
                spec,
                self._settings,
                self._server,
                deque() if description.has_own_queue(spec) else self._shared_queue,
                self._dispatch,
                self._reschedule,
            )
            for spec in specs
        ]

    def _set_depth(self) -> None:
        for instance in self._instances:
            instance.depth = PREFETCH_DEPTH if len(self._instances) == 1 else 1

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call the function directly, because all methods run on the core's event loop."""
        function(*arguments)

    async def start(self) -> None:
        await self._start(self._instances)

    async def _start(self, instances: list[ProcessInstance]) -> None:
        interpreter = await asyncio.to_thread(
            find_interpreter, self._settings.environment, self._description.directory
        )
        starts = [instance.start(interpreter) for instance in instances]
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def update(self, description: ModelDescription, growth: list[int]) -> bool:
        """Change the instance counts. Waits for the work and the `finalize` of instances that are removed."""
        used = {instance.name for instance in self._instances} | self._ending
        specs = specs_to_add(description, growth, used)
        if len(specs) != sum(max(count, 0) for count in growth):
            return False  # the names of instances that are ending are needed
        added = self._make(description, specs)
        try:
            await self._start(added)
        except BaseException:
            await asyncio.gather(*(instance.stop() for instance in added))
            raise
        self._description = description
        removed = self._instances_to_remove(growth)
        self._instances = [instance for instance in self._instances if instance not in removed] + added
        self._set_depth()
        self._dispatch()
        await self._end_instances(removed)
        return True

    def _instances_to_remove(self, growth: list[int]) -> list[ProcessInstance]:
        """Return the instances by which groups shrink. Instances that are not up go first, then the last ones."""
        groups = list(dict.fromkeys(instance.group for instance in self._instances))
        removed: list[ProcessInstance] = []
        for name, count in zip(groups, growth, strict=True):
            members = [instance for instance in reversed(self._instances) if instance.group == name]
            members.sort(key=lambda instance: instance.state is State.UP)
            removed += members[: max(-count, 0)]
        return removed

    async def _end_instances(self, instances: list[ProcessInstance]) -> None:
        names = {instance.name for instance in instances}
        self._ending |= names
        try:
            await asyncio.gather(*(instance.stop() for instance in instances))
        finally:
            self._ending -= names
            self._dispatch()  # work that a killed process has not started

    def put(self, work: WorkItem, instance: int | None = None) -> None:
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
        """Check the running instances; restarting instances are ignored."""
        checks = [instance.check_ready() for instance in self._instances if instance.state is State.UP]
        return all(await asyncio.gather(*checks))

    async def stop(self) -> None:
        self._stopped = True
        self._fail_waiting()
        try:
            await asyncio.gather(*(instance.stop() for instance in self._instances))
        finally:
            self._fail_waiting()  # items requeued by the instances

    def _dispatch(self) -> None:
        if self._stopped:
            return
        for instance in self._instances:
            instance.take()
            if instance.state is State.DOWN and (instance.has_own_queue or self._all_down()):
                _fail_queue(
                    instance.queue,
                    f"no instance of model '{self._description.name}' is alive. {instance.reason}",
                )

    def _fail_waiting(self) -> None:
        for instance in self._instances:
            _fail_queue(instance.queue, f"model '{self._description.name}' is unloaded")

    def _all_down(self) -> bool:
        return all(instance.state is State.DOWN for instance in self._instances)


def _fail_queue(queue: deque[WorkItem], message: str) -> None:
    while queue:
        work = queue.popleft()
        for stream in cast("list[ResponseStream]", work.streams):
            stream.fail(Unavailable(message))
        work.finish()


MAX_FAILED_STARTS = 5
"""Consecutive failed starts after which an instance stays down."""


class State(Enum):
    """State of an instance: STARTING (first start or restart), UP, or DOWN (permanently)."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"


class ProcessInstance:
    """One instance: starts its process, and restarts it when it ends unexpectedly. Used on the core's event loop.

    - changed: called when work can be dispatched or must be failed
    - queue: waiting work items; items that were not started when a process ended are requeued
    - depth: maximum number of work items in the process. A second item saves a round trip between executions
    - reason: why the instance is not up; "" if it never failed
    """

    def __init__(
        self,
        description: ModelDescription,
        spec: InstanceSpec,
        settings: PythonSettings,
        server: LocalServer,
        queue: deque[WorkItem],
        changed: Callable[[], None],
        reschedule: Rescheduler | None,
    ) -> None:
        self.name, self.group = spec.name, spec.group.name
        self.has_own_queue = description.has_own_queue(spec)
        self.state = State.STARTING
        self.reason = ""
        self.queue = queue
        self.depth = 1
        self._description, self._settings, self._server = description, settings, server
        self._args = description.args(spec)
        self._changed = changed
        self._reschedule = reschedule
        self._running: RunningModel | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = False
        self._restarts = Restarts(
            MAX_FAILED_STARTS,
            restart_counter(server.metrics),
        )

    async def start(self, interpreter: Interpreter) -> None:
        """Start the process, initialize the model, and restart the process from now on. Raises `ServerError`."""
        try:
            running = await self._start(interpreter)
        except ServerError:
            self.state = State.DOWN
            raise
        self._supervisor = asyncio.create_task(self._supervise(running, interpreter))
        self._set_state(State.UP)

    def take(self) -> None:
        """Send queued work items to the process while it has free capacity."""
        running = self._running
        while (
            self.queue and self.state is State.UP and running is not None and running.num_works < self.depth
        ):
            running.execute(self.queue.popleft())

    async def check_ready(self) -> bool:
        """Return the result of the model's `is_ready`; False if the process ends meanwhile."""
        return self._running is not None and await self._running.check_ready()

    async def stop(self) -> None:
        """Finalize the model and end the process; kill it after `END_TIMEOUT`."""
        self._stopping = True
        ended = False
        try:
            if self._running is not None:
                ended = await self._running.stop(END_TIMEOUT)
            else:
                ended = True
                if self._supervisor is not None:
                    self._supervisor.cancel()  # the instance waits for a restart, or is restarting
        finally:
            if not ended:
                logger.error("instance '%s' did not end in time and was killed", self.name)
            if self._supervisor is not None:
                await asyncio.wait((self._supervisor,))
            self.state = State.DOWN

    async def _start(self, interpreter: Interpreter) -> RunningModel:
        running = RunningModel(self.name, self._server, self._work_done, self._reschedule)
        await running.start(interpreter, self._settings, self._description, self._args)
        self._running = running
        return running

    async def _supervise(self, running: RunningModel, interpreter: Interpreter) -> None:
        """Wait for the end of each process and start the next process."""
        while True:
            reason = await asyncio.shield(running.ended)
            await running.kill()
            self._running = None
            if self._stopping:
                error = Unavailable(f"model '{self._description.name}' is unloaded")
                self.queue.extendleft(reversed(running.fail_all(error)))
                return
            self._restarts.record_failure()
            self._report_failure(
                f"Stub process '{self.name}' is not healthy: the process has ended ({reason})"
            )
            self.queue.extendleft(reversed(running.fail_all(Restarting(self.reason))))
            self._changed()  # other instances can execute the shared work
            restarted = await self._restart(interpreter)
            if restarted is None:
                return
            running = restarted
            self._set_state(State.UP)

    async def _restart(self, interpreter: Interpreter) -> RunningModel | None:
        """Start the process again, with exponential back-off. Returns None after too many failures."""

        def failed(error: Exception) -> None:
            self._report_failure(error.message if isinstance(error, ServerError) else str(error))

        running = await self._restarts.restart(lambda: self._start(interpreter), failed)
        if running is None:
            logger.error(
                "instance '%s' failed to start %d times and is not restarted", self.name, MAX_FAILED_STARTS
            )
            self._set_state(State.DOWN)
        return running

    def _report_failure(self, reason: str) -> None:
        logger.error("instance '%s' of a Python model failed: %s", self.name, reason)
        self.state, self.reason = State.STARTING, reason

    def _work_done(self) -> None:
        self._restarts.record_success()
        self._changed()

    def _set_state(self, state: State) -> None:
        self.state = state
        self._changed()
