"""Load generator: starts worker processes, runs loads on them and collects their records."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from neso.perf.client.worker import WorkerConfig, WorkerUsage, work
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.endpoints.registry import check_endpoint_type
from neso.perf.errors import PerfError
from neso.perf.load.counter import SharedCounter
from neso.perf.load.plan import LoadPlan
from neso.perf.load.runner import Share
from neso.perf.load.stability import StabilityCheck
from neso.perf.records import Records, RunResult, epoch_offset_ns
from neso.perf.requests import InputSource, PerfRequest, sessions_of

ENDS_SWEEP = ("interrupted", "server", "errors", "worker")
"""Stop reasons after which no further load is run."""

OnRecords = Callable[[Records], None]
"""Called a few times a second with the new records."""

_START_DELAY_NS = 50_000_000
"""Time until a load starts, so that all workers start together."""
_POLL_SECONDS = 0.05
_SHOW_NS = 250_000_000
_SERVER_GONE_SECONDS = 2.0
"""The server counts as gone when every request failed to connect for this time."""
_MIN_FAILURES = 10
"""The run ends early when at least this many requests failed, all with the same error, and none succeeded."""
_STOP_SECONDS = 10.0
_READY_SECONDS = 600.0
_SESSIONS_PER_WORKER = 64


def default_workers(concurrency: int, rate: float | None = None) -> int:
    """Return the number of worker processes for a load: one per 64 requests in flight or 1,000 requests per second.

    At most half of the cores, at least one; the server may run on the same machine.
    """
    wanted = math.ceil(max(concurrency / _SESSIONS_PER_WORKER, (rate or 0) / 1000))
    return max(1, min(wanted, (os.cpu_count() or 1) // 2))


class LoadGenerator:
    """Worker processes that send the requests of an input source to one endpoint. Use it as a context manager.

        with LoadGenerator(EndpointOptions(models=("m",), urls=("localhost:8000",)), requests) as generator:
            result = generator.run(LoadPlan(concurrency=8, requests=1000))

    The processes are spawned: a script needs the usual `if __name__ == "__main__"`.
    """

    def __init__(
        self, options: EndpointOptions, source: InputSource | Iterable[PerfRequest], *, workers: int = 1
    ) -> None:
        """Raises `PerfError` if the source is empty or invalid."""
        requests = source if isinstance(source, Iterable) else source.requests()
        sessions = sessions_of(requests)
        if not sessions:
            raise PerfError("the input has no requests")
        check_endpoint_type(options.endpoint_type)
        if options.is_engine:
            workers = 1  # each worker would load the model
        context = multiprocessing.get_context("spawn")
        self._counter = SharedCounter(context)
        self.sessions = sessions
        self.options = options
        self._context: Any = context
        self._epoch_offset_ns = epoch_offset_ns()
        self._workers: list[_WorkerHandle] = []
        self._num_workers = workers

    def __enter__(self) -> LoadGenerator:
        """Start the workers. Raises `PerfError` if a worker cannot open the endpoint."""
        with _on_ctrl_c(signal.SIG_IGN):  # in the workers
            for number in range(self._num_workers):
                config = WorkerConfig(
                    self.options,
                    self.sessions,
                    Share(number, self._num_workers),
                    self._counter,
                    self._epoch_offset_ns,
                )
                self._workers.append(_WorkerHandle(self._context, config))
        try:
            for worker in self._workers:
                worker.expect_ready()
        except BaseException:
            self._close(kill=True)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._close(kill=exception[0] is not None)

    def wait_for_model(self, seconds: float) -> None:
        """Send the first request repeatedly until it succeeds. Raises `PerfError` after `seconds`."""
        end = time.monotonic() + seconds
        probe = LoadPlan(requests=1, warm_up=True)
        while True:
            records = self.run(probe).records
            if len(records) and records.ok[0]:
                return
            if time.monotonic() > end:
                message = records.strings["error_message"][0] if len(records) else "no response"
                raise PerfError(f"the model is not ready after {seconds:g} s: {message}")
            time.sleep(0.25)

    def run(
        self,
        plan: LoadPlan,
        *,
        warm_up: LoadPlan | None = None,
        on_records: OnRecords | None = None,
    ) -> RunResult:
        """Run the warm-up and the load, and return the records of both.

        `on_records` gets the new records, about four times a second. The run ends early, with a reason in the result,
        on Ctrl-C, when the server is gone, or when every request fails with the same error. Raises `PerfError` for a
        plan that the input cannot serve.
        """
        parts: list[Records] = []
        if warm_up is not None:
            phase = self._phase(replace(warm_up, warm_up=True), on_records)
            parts += phase.parts
            if phase.reason in ENDS_SWEEP:
                return self._result(plan, parts, phase)
        phase = self._phase(plan, on_records)
        return self._result(plan, parts + phase.parts, phase)

    def _phase(self, plan: LoadPlan, on_records: OnRecords | None) -> _Phase:
        self._counter.reset()
        phase = _Phase(plan, time.monotonic_ns() + _START_DELAY_NS)
        presses: list[int] = []
        # A KeyboardInterrupt could be raised amid a message of a worker.
        with _on_ctrl_c(lambda number, _: presses.append(number)):
            for worker in self._workers:
                worker.send("run", plan, phase.start_ns)
            running = list(self._workers)
            while running:
                running = self._collect(running, phase)
                self._check_end(phase)
                if on_records is not None:
                    phase.show(on_records)
                if len(presses) > 1:
                    raise KeyboardInterrupt
                if presses and phase.reason != "interrupted":
                    self._stop(phase, "interrupted")
                if phase.must_end_ns and time.monotonic_ns() > phase.must_end_ns:
                    phase.errors.append("a worker did not stop in time; its last records are lost")
                    break
        return phase

    def _collect(self, running: list[_WorkerHandle], phase: _Phase) -> list[_WorkerHandle]:
        """Read what the workers sent; return those that still run."""
        ready = wait([worker.connection for worker in running], _POLL_SECONDS)
        ended: list[_WorkerHandle] = []
        for worker in running:
            if worker.connection not in ready:
                continue
            try:
                kind, *content = worker.connection.recv()
            except (EOFError, OSError):
                kind, content = "failed", [f"worker {worker.number} died: {worker.exit_status()}"]
                ended.append(worker)
                self._workers.remove(worker)
                phase.errors.append(content[0])
                self._stop(phase, "worker")
            if kind == "records":
                phase.add(content[0])
            elif kind == "done":
                phase.usage.append(content[0])
                ended.append(worker)
            elif kind == "failed" and worker not in ended:
                raise PerfError(content[0])
        return [worker for worker in running if worker not in ended]

    def _check_end(self, phase: _Phase) -> None:
        if phase.reason:
            return
        if phase.server_is_gone():
            phase.errors.append(f"the server is gone: {phase.last_error}")
            self._stop(phase, "server")
        elif phase.fails_from_the_start():
            phase.errors.append(f"every request fails: {phase.last_error}")
            self._stop(phase, "errors")
        elif phase.stability is not None and phase.stability.advance(time.monotonic_ns()):
            if not phase.stability.is_stable:
                phase.errors.append(
                    f"not stable after {len(phase.stability.windows)} windows; the last three are reported"
                )
            self._stop(phase, "stable", starting_only=True)

    def _stop(self, phase: _Phase, reason: str, *, starting_only: bool = False) -> None:
        phase.reason = reason
        if not starting_only:
            phase.must_end_ns = time.monotonic_ns() + int(_STOP_SECONDS * 1e9)
        for worker in self._workers:
            worker.send("stop_starting" if starting_only else "stop")

    def _result(self, plan: LoadPlan, parts: list[Records], phase: _Phase) -> RunResult:
        records = Records.concatenate(parts)
        columns = records.columns
        start_ns = phase.start_ns
        if phase.stability is not None:
            start_ns = phase.stability.measured_from_ns
            columns["warm_up"] = columns["warm_up"] | (columns["end_ns"] < start_ns)
        measured = columns["end_ns"][~columns["warm_up"]]
        end_ns = int(measured.max()) if len(measured) else time.monotonic_ns()
        reason = phase.reason or (
            "schedule" if plan.schedule else "requests" if _is_counted(plan) else "duration"
        )
        return RunResult(
            records,
            load_name(plan),
            {"endpoint": as_json(self.options), "load": as_json(plan)},
            start_ns,
            end_ns,
            reason,
            phase.errors,
            _client_figures(phase, records),
        )

    def _close(self, *, kill: bool) -> None:
        for worker in self._workers:
            worker.close(kill=kill)
        self._workers = []


class _WorkerHandle:
    """A worker process and the connection to it."""

    def __init__(self, context: Any, config: WorkerConfig) -> None:
        self.number = config.share.worker
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(config, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def expect_ready(self) -> None:
        """Wait until the worker can run loads. Raises `PerfError`."""
        if not self.connection.poll(_READY_SECONDS):
            raise PerfError(f"worker {self.number} is not ready after {_READY_SECONDS:g} s")
        try:
            kind, *content = self.connection.recv()
        except (EOFError, OSError):
            raise PerfError(f"worker {self.number} did not start: {self.exit_status()}") from None
        if kind == "failed":
            raise PerfError(content[0])

    def send(self, *message: Any) -> None:
        with suppress(OSError):  # it has died, which reading reports
            self.connection.send(message)

    def exit_status(self) -> str:
        self._process.join(5)
        return f"exit status {self._process.exitcode}"

    def close(self, *, kill: bool) -> None:
        if kill:
            self._process.kill()
        else:
            self.send("close")
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.connection.close()


class _Phase:
    """State of a running load."""

    def __init__(self, plan: LoadPlan, start_ns: int) -> None:
        self.start_ns = start_ns
        self.parts: list[Records] = []
        self.errors: list[str] = []
        self.usage: list[WorkerUsage] = []
        self.reason = ""
        self.must_end_ns = 0
        self.last_error = ""
        self.stability = StabilityCheck(plan, start_ns) if plan.stable_percent and not plan.warm_up else None
        self._num_ok = 0
        self._num_failed = 0
        self._errors: set[str] = set()
        self._unreachable_since_ns = 0
        self._num_shown = 0
        self._show_ns = start_ns

    def show(self, on_records: OnRecords) -> None:
        """Pass new records to `on_records`, at most every `_SHOW_NS`."""
        now = time.monotonic_ns()
        if now >= self._show_ns:
            self._show_ns = now + _SHOW_NS
            new, self._num_shown = self.parts[self._num_shown :], len(self.parts)
            on_records(Records.concatenate(new))

    def add(self, records: Records) -> None:
        self.parts.append(records)
        if self.stability is not None:
            self.stability.add(records)
        kinds = records.strings["error_kind"]
        failed = [i for i, kind in enumerate(kinds) if kind]
        self._num_ok += int(records.ok.sum())
        self._num_failed += len(failed)
        for i in failed:
            self.last_error = records.strings["error_message"][i]
            if len(self._errors) < _MIN_FAILURES:
                self._errors.add(f"{kinds[i]} {records.columns['status'][i]}")
        if any(kind != "connect" for kind in kinds):
            self._unreachable_since_ns = 0
        elif kinds and not self._unreachable_since_ns:
            self._unreachable_since_ns = int(records.columns["end_ns"].min())

    def server_is_gone(self) -> bool:
        """Whether all requests failed to connect for `_SERVER_GONE_SECONDS`."""
        since = self._unreachable_since_ns
        return bool(since) and time.monotonic_ns() - since > _SERVER_GONE_SECONDS * 1e9

    def fails_from_the_start(self) -> bool:
        """Whether all requests failed with the same error, one that repetition does not fix."""
        if self._num_ok or self._num_failed < _MIN_FAILURES or len(self._errors) != 1:
            return False
        kind, status = next(iter(self._errors)).split()
        return kind in ("protocol", "build", "empty") or (
            kind == "http" and status in ("400", "401", "403", "404", "405", "422")
        )


def load_name(plan: LoadPlan) -> dict[str, Any]:
    """Return the fields that name a load: its concurrency, its rate, or `fixed_schedule`, and further limits."""
    found: dict[str, Any] = {}
    if plan.users:
        found = {"user_centric_rate": plan.rate, "num_users": plan.users}
    elif plan.rate is not None:
        found = {"request_rate": plan.rate}
    elif plan.schedule:
        found = {"fixed_schedule": True}
    if plan.concurrency:
        found["concurrency"] = plan.concurrency
    if plan.prefill_concurrency:
        found["prefill_concurrency"] = plan.prefill_concurrency
    return found


def _is_counted(plan: LoadPlan) -> bool:
    return plan.requests is not None or plan.sessions is not None


def _client_figures(phase: _Phase, records: Records) -> dict[str, float]:
    """Return the cost of the client. CPU time is that of the workers."""
    cpu = sum(usage.cpu_seconds for usage in phase.usage)
    measured = records.select(~records.columns["warm_up"])
    events = max(1, len(measured.arrivals_ns))
    return {
        "workers": float(len(phase.usage)),
        "cpu_seconds": cpu,
        "cpu_us_per_request": cpu * 1e6 / max(1, len(measured)),
        "cpu_us_per_event": cpu * 1e6 / events,
        "max_loop_lag_ms": max((usage.max_loop_lag_ns for usage in phase.usage), default=0) * 1e-6,
    }


def as_json(options: Any) -> dict[str, Any]:
    """Return the fields of options as JSON values, without secrets."""
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    fields.pop("headers", None)
    fields.pop("api_key", None)
    return {name: _json_value(value) for name, value in fields.items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, str | int | float | bool | dict) else str(value)


@contextmanager
def _on_ctrl_c(handler: Callable[[int, Any], object] | signal.Handlers) -> Iterator[None]:
    """Handle SIGINT by `handler` within this context, unless it is ignored or this is not the main thread."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
