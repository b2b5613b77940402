"""Worker process: runs its share of each load and sends records to the parent meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import queue
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from neso.perf.client.clock import PreciseTimer
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.endpoints.registry import open_target
from neso.perf.errors import PerfError
from neso.perf.load.counter import SharedCounter
from neso.perf.load.plan import LoadPlan
from neso.perf.load.runner import Conversations, LoadRunner, Share
from neso.perf.records import Records, RequestRecord
from neso.perf.requests import PerfRequest

_FLUSH_SECONDS = 0.2
_FLUSH_RECORDS = 64
"""Records are sent in small batches: making the columns of one delays the event loop by less than a millisecond."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Configuration of a worker process, apart from the load."""

    options: EndpointOptions
    sessions: list[list[PerfRequest]]
    share: Share
    counter: SharedCounter
    epoch_offset_ns: int


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """Cost of a worker during one load: CPU time, and the longest delay of a timer of its event loop."""

    cpu_seconds: float
    max_loop_lag_ns: int


def work(config: WorkerConfig, connection: Connection) -> None:
    """Entry point of the process. Messages of the parent are tuples: ("run", plan, start_ns), ("stop",), ("close",).

    The worker sends ("ready",), ("records", Records), ("done", WorkerUsage) and ("failed", message).
    """
    # Ctrl-C reaches the process group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import uvloop

        runner: Any = uvloop.run
    except ImportError:  # Windows
        runner = asyncio.run
    try:
        runner(_Worker(config, connection).serve())
    except PerfError as error:
        connection.send(("failed", str(error)))


class _Worker:
    def __init__(self, config: WorkerConfig, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self._conversations = Conversations(config.sessions)
        self._messages: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self._records: list[RequestRecord] = []
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._runner: LoadRunner | None = None
        self._max_lag = 0

    async def serve(self) -> None:
        """Run loads until the parent closes. Raises `PerfError` if the target cannot be opened."""
        loop = asyncio.get_running_loop()
        self._target = await open_target(self._config.options)
        self._timer = PreciseTimer()
        writer = threading.Thread(target=self._write, daemon=True)
        writer.start()
        loop.add_reader(self._connection.fileno(), self._read)
        # uvloop makes the descriptor non-blocking: a write to a full pipe would fail in the middle of a message.
        os.set_blocking(self._connection.fileno(), True)
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        self._send("ready")
        while (message := await self._messages.get())[0] != "close":
            if message[0] == "run":
                await self._run(*message[1:])
        loop.remove_reader(self._connection.fileno())
        self._timer.close()
        await self._target.close()
        self._outbox.put(None)
        writer.join()

    async def _run(self, plan: LoadPlan, start_ns: int) -> None:
        config, options = self._config, self._config.options
        self._runner = LoadRunner(
            plan,
            self._conversations,
            self._target,
            self._add,
            counter=config.counter,
            share=config.share,
            models=options.models or ("",),
            adapters=options.adapters,
            random_models=options.model_selection == "random",
            keep_text=options.keep_text,
            sleep_until=self._timer.sleep_until,
        )
        self._max_lag = 0
        cpu = time.process_time()
        flush = asyncio.ensure_future(self._flush_periodically())
        try:
            await self._runner.run(start_ns)
        except PerfError as error:
            self._send("failed", str(error))
        finally:
            flush.cancel()
            self._runner = None
        self._flush()
        self._send("done", WorkerUsage(time.process_time() - cpu, self._max_lag))

    def _add(self, record: RequestRecord) -> None:
        self._records.append(record)
        if len(self._records) >= _FLUSH_RECORDS:
            self._flush()

    async def _flush_periodically(self) -> None:
        while True:
            due = time.monotonic_ns() + int(_FLUSH_SECONDS * 1e9)
            await asyncio.sleep(_FLUSH_SECONDS)
            self._max_lag = max(self._max_lag, time.monotonic_ns() - due)
            self._flush()

    def _flush(self) -> None:
        if self._records:
            self._send("records", Records.of(self._records, self._config.epoch_offset_ns))
            self._records = []

    def _read(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):  # the parent has died
            message = ("close",)
        if self._runner is not None and message[0] in ("stop", "close"):
            self._runner.stop()
        if self._runner is not None and message[0] == "stop_starting":
            self._runner.stop_starting()
        self._messages.put_nowait(message)

    def _send(self, *message: Any) -> None:
        self._outbox.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _write(self) -> None:
        """Write to the parent from a thread: a full pipe must not block the event loop."""
        while (data := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(data)
            except OSError:  # the parent has died
                return
