"""Runs one worker's share of a load plan: decides when each session starts; the target sends its requests."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

from neso.perf.client.target import Target
from neso.perf.endpoints.base import History
from neso.perf.load.arrivals import SessionStart, rate_arrivals, scheduled_arrivals, user_arrivals
from neso.perf.load.plan import LoadPlan
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest

_FAILED_CONNECT_PAUSE_SECONDS = 0.1
_HASH = 0x9E3779B97F4A7C15
_CANCEL_SALT, _ADAPTER_SALT = 0x5BD1E995, 0x2C1B3C6D


class Counter(Protocol):
    def take(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Share:
    """Worker `worker` of `workers`."""

    worker: int = 0
    workers: int = 1

    def of(self, total: int) -> int:
        """Return this worker's part of a number; the parts add up to it."""
        return total // self.workers + (self.worker < total % self.workers)


class Conversations:
    """The sessions of an input source, repeated without end, with numbers for their requests.

    Session n is `n % num_sessions` of the source. Its requests are numbered from `first_number(n)` on, so a limit on
    requests is exact without communication between workers.
    """

    def __init__(self, sessions: Sequence[list[PerfRequest]]) -> None:
        self.sessions = sessions
        self._starts = [0, *accumulate(len(session) for session in sessions)]

    def __getitem__(self, number: int) -> list[PerfRequest]:
        return self.sessions[number % len(self.sessions)]

    def first_number(self, number: int) -> int:
        """Return the number of the first request of a session."""
        rounds, position = divmod(number, len(self.sessions))
        return rounds * self._starts[-1] + self._starts[position]

    def first_index(self, number: int) -> int:
        """Return the position of the first request of a session in the source."""
        return self._starts[number % len(self.sessions)]

    def num_sessions(self, requests: int) -> int:
        """Return the number of sessions that have the first `requests` requests; the last may be cut."""
        rounds, rest = divmod(requests, self._starts[-1])
        return rounds * len(self.sessions) + bisect.bisect_left(self._starts, rest)


class LoadRunner:
    """Runs a share of the load on a target, in one event loop.

    `on_record` gets each record when its request is complete. `counter` is shared by the workers.
    """

    def __init__(
        self,
        plan: LoadPlan,
        conversations: Conversations,
        target: Target,
        on_record: Callable[[RequestRecord], None],
        *,
        counter: Counter,
        share: Share = Share(),
        models: Sequence[str] = ("",),
        adapters: Sequence[str] = (),
        random_models: bool = False,
        keep_text: bool = False,
        sleep_until: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._plan = plan
        self._conversations = conversations
        self._target = target
        self._on_record = on_record
        self._counter = counter
        self._share = _active_share(share, plan)
        self._models = models
        self._adapters = adapters
        self._random_models = random_models
        self._keep_text = keep_text
        self._sleep_until = sleep_until or _sleep_until
        self._cancel_below = int(plan.cancel_percent / 100 * 2**32)
        self._num_sessions = self._session_limit()
        self._prefill_slots = (
            asyncio.Semaphore(self._share.of(plan.prefill_concurrency)) if plan.prefill_concurrency else None
        )
        self._stopping = False
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pauses: set[asyncio.Future[Any]] = set()

    def _session_limit(self) -> int | None:
        plan, limits = self._plan, []
        if plan.requests is not None and not plan.users:
            limits.append(self._conversations.num_sessions(plan.requests))
        if plan.sessions is not None:
            limits.append(plan.sessions)
        if plan.schedule:
            limits.append(len(self._conversations.sessions))
        return min(limits) if limits else None

    async def run(self, start_ns: int) -> None:
        """Run from `start_ns` until the plan's end; requests in flight are complete or cancelled when it returns."""
        if self._share.worker >= self._share.workers:
            return
        if self._plan.is_open_loop:
            work = self._open_loop(start_ns)
        else:
            work = self._closed_loop(start_ns)
        task = asyncio.ensure_future(work)
        timers: list[asyncio.TimerHandle] = []
        if self._plan.seconds is not None:
            loop = asyncio.get_running_loop()
            left = self._plan.seconds + (start_ns - time.monotonic_ns()) * 1e-9
            timers.append(loop.call_later(max(0, left), self.stop_starting))
            if self._plan.grace_seconds is not None:
                timers.append(loop.call_later(max(0, left + self._plan.grace_seconds), self.stop))
        try:
            await task
        finally:
            for timer in timers:
                timer.cancel()

    def stop_starting(self) -> None:
        """Start no more requests; those in flight are completed."""
        self._stopping = True
        for pause in list(self._pauses):
            pause.cancel()

    def stop(self) -> None:
        """Start no more requests and cancel those in flight."""
        self.stop_starting()
        self._target.cancel_all()

    async def _closed_loop(self, start_ns: int) -> None:
        """Keep `concurrency` sessions in flight, each in a task."""
        await self._pause_until(start_ns)
        total, ramp = self._plan.concurrency, int(self._plan.ramp_seconds * 1e9)
        slots = range(self._share.worker, total, self._share.workers)
        await asyncio.gather(*(self._slot(start_ns + slot * ramp // total) for slot in slots))

    async def _slot(self, start_ns: int) -> None:
        await self._pause_until(start_ns)
        while not self._stopping:
            number = self._counter.take()
            if self._num_sessions is not None and number >= self._num_sessions:
                return
            await self._run_session(self._start_of(number), time.monotonic_ns())

    async def _open_loop(self, start_ns: int) -> None:
        """Start sessions at their times; beyond `concurrency` they wait for one to end."""
        share, plan = self._share, self._plan
        slots = asyncio.Semaphore(share.of(plan.concurrency)) if plan.concurrency else None
        for position, start in enumerate(self._arrivals()):
            if self._num_sessions is not None and start.number >= self._num_sessions:
                if plan.schedule:
                    continue  # its order is that of time, not of numbers
                break
            if plan.users and self._is_beyond(start.first_request):
                break
            if position % share.workers != share.worker:
                continue
            intended_ns = start_ns + start.offset_ns
            await self._pause_until(intended_ns)
            if slots is not None and not self._stopping:
                await self._acquire(slots)
            if self._stopping:
                break
            task = asyncio.ensure_future(self._run_session(start, intended_ns))
            self._tasks.add(task)
            task.add_done_callback(self._session_ended)
            if slots is not None:
                task.add_done_callback(lambda _: slots.release())
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._failure is not None:
            raise self._failure

    def _session_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure
            self.stop()

    def _arrivals(self) -> Iterator[SessionStart]:
        if self._plan.users:
            return user_arrivals(self._plan, lambda number: len(self._conversations[number]))
        if self._plan.schedule:
            pairs = scheduled_arrivals(self._conversations.sessions)
        else:
            pairs = rate_arrivals(self._plan)
        return (self._start_of(number, offset) for number, offset in pairs)

    def _start_of(self, number: int, offset_ns: int = 0) -> SessionStart:
        """Return the start of a complete session."""
        turns = len(self._conversations[number])
        return SessionStart(number, offset_ns, turns, self._conversations.first_number(number))

    async def _acquire(self, slots: asyncio.Semaphore) -> None:
        """Wait for a slot or the end of the load."""
        if slots.locked():
            await self._interruptible(slots.acquire())
        else:
            await slots.acquire()

    async def _pause_until(self, ns: int) -> None:
        """Sleep until a time of the monotonic clock, or the end of the load."""
        if ns > time.monotonic_ns() and not self._stopping:
            await self._interruptible(self._sleep_until(ns))

    async def _interruptible(self, waiting: Awaitable[Any]) -> None:
        """Wait, but not longer than until the load stops."""
        future = asyncio.ensure_future(waiting)
        self._pauses.add(future)
        try:
            await future
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            self._pauses.discard(future)

    async def _run_session(self, start: SessionStart, intended_ns: int) -> None:
        """Send the turns of a session one after the other. It ends with the first that fails."""
        session, plan, number = self._conversations[start.number], self._plan, start.number
        first_index = self._conversations.first_index(number)
        several = len(session) > 1
        history: History = []
        name = f"{session[0].session}#{number}" if session[0].session else ""
        for turn, request in enumerate(session[: start.turns]):
            request_number = start.first_request + turn * (plan.users or 1)
            if self._is_beyond(request_number):
                break
            if turn:
                now = time.monotonic_ns()
                if plan.users:
                    intended_ns = max(now, intended_ns + plan.turn_gap_ns)
                else:
                    intended_ns = now + int(request.delay_ms * 1e6)
                await self._pause_until(intended_ns)
            if self._prefill_slots is not None:
                await self._acquire(self._prefill_slots)
                if not plan.is_open_loop:
                    intended_ns = max(intended_ns, time.monotonic_ns())
            if self._stopping:
                break
            if self._adapters and not request.adapter:
                request = replace(request, adapter=self._choose(self._adapters, number, _ADAPTER_SALT))
            if name:
                is_last = turn + 1 == start.turns or self._is_beyond(request_number + (plan.users or 1))
                request = replace(request, session=name, ends_session=is_last)
            record = RequestRecord(
                model=request.model or self._choose(self._models, number),
                adapter=request.adapter,
                session=name,
                number=request_number,
                index=first_index + turn,
                turn=turn,
                worker=self._share.worker,
                intended_ns=intended_ns,
                warm_up=plan.warm_up,
            )
            if request.input_tokens is not None:
                record.requested_input_tokens = request.input_tokens
            if request.max_tokens is not None:
                record.requested_output_tokens = request.max_tokens
            if several or self._keep_text:
                record.output_text = ""
            release = self._prefill_release()
            await self._target.send(request, record, history, self._cancel_after(record.number), release)
            if release is not None:
                release()
            if several and record.ok:
                history.append(self._target.message(request))
                history.append({"role": "assistant", "content": record.output_text or ""})
            if not self._keep_text:
                record.output_text = None
            self._on_record(record)
            if not record.ok:
                if record.error_kind == "connect":
                    await self._pause_until(record.end_ns + int(_FAILED_CONNECT_PAUSE_SECONDS * 1e9))
                else:
                    await asyncio.sleep(0)  # requests that cannot be built fail without waiting for anything
                break
        if name:
            self._target.end_session(name)

    def _is_beyond(self, request_number: int) -> bool:
        """Whether a request is not one of those that the plan counts."""
        return self._plan.requests is not None and request_number >= self._plan.requests

    def _prefill_release(self) -> Callable[[], None] | None:
        """Return a function that releases a slot of the prefill phase at its first call; None without a limit."""
        if self._prefill_slots is None:
            return None
        held = [self._prefill_slots]

        def release() -> None:
            if held:
                held.pop().release()

        return release

    def _choose(self, names: Sequence[str], number: int, salt: int = 0) -> str:
        """Return the model or adapter of a session. Choices with different salts are independent."""
        if self._random_models:
            return names[self._random32(number ^ salt) % len(names)]
        return names[number % len(names)]

    def _cancel_after(self, number: int) -> float | None:
        if not self._cancel_below or self._random32(number ^ _CANCEL_SALT) >= self._cancel_below:
            return None
        return self._plan.cancel_seconds

    def _random32(self, number: int) -> int:
        """Return 32 pseudo-random bits that depend on the seed and a number only (splitmix64)."""
        z = (number + self._plan.seed * 1_000_003 + 1) * _HASH & 0xFFFFFFFFFFFFFFFF
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        return (z ^ (z >> 31)) >> 32


def _active_share(share: Share, plan: LoadPlan) -> Share:
    """Return the share of a worker if only as many workers take part as the plan has slots."""
    slots = [slots for slots in (plan.concurrency, plan.prefill_concurrency) if slots]
    return Share(share.worker, min([share.workers, *slots]))


async def _sleep_until(ns: int) -> None:
    await asyncio.sleep((ns - time.monotonic_ns()) * 1e-9)
