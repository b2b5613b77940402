"""A rank's connection to its supervisor and to the other ranks, from start to end."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import queue
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec

import neso
import neso._native as _native
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.ipc.heartbeat import heartbeat_interval
from neso.engine.parallel.control import (
    Alive,
    Connect,
    Failed,
    Hello,
    Leaving,
    Loaded,
    RankConnection,
    Start,
    ToRank,
    connect,
    split_address,
)
from neso.engine.parallel.handshake import introduce, new_nonce, rank_secret
from neso.engine.parallel.launcher import check_launcher, missing_library, started_by_torchrun
from neso.engine.parallel.layout import RankLayout
from neso.engine.parallel.plan_channel import PlanReceiver, PlanSender
from neso.engine.parallel.ranked_runner import RankedRunner, follow
from neso.engine.runners.base import Runner, SpecRunner
from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.weights.checkpoint import INDEX_FILE
from neso.engine.weights.engine_directory import CONFIG_FILE

logger = logging.getLogger(__name__)

FAILED_STATUS = 1
_CONNECT_TIMEOUT = 60.0


class RankSession:
    """One rank of a model.

    Weights are loaded before the ranks are connected by MPI: a rank that cannot load them would leave the others
    blocked in a collective operation. The constructor connects to the supervisor at `address`; raises `OSError`,
    `EngineError`, `HandshakeError`, `msgspec.MsgspecError`.
    """

    def __init__(self, address: str, rank: int, size: int) -> None:
        self.rank = rank
        self._address = address
        secret = rank_secret(address)
        self._control = RankConnection(connect(address, _CONNECT_TIMEOUT))
        self._messages: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        self._plans: PlanSender | None = None
        self._ranked: RankedRunner | None = None
        self._connected = False
        library, problem = _library()
        hello = Hello(
            rank=rank,
            size=size,
            pid=os.getpid(),
            host=host_id(),
            cpus=sorted(os.sched_getaffinity(0)),
            version=neso.__version__,
            library=library,
            nonce=new_nonce(),
        )
        introduce(self._control, hello, secret)
        threading.Thread(target=self._read, name="rank-control", daemon=True).start()
        if problem is not None:
            self.fail(problem)
        start = self._next()
        assert isinstance(start, Start)
        self.engine_address = start.engine_address
        self.config = msgspec.json.decode(start.config, type=EngineConfig)
        self.layout = RankLayout(rank, self.config.tensor_parallel_size, self.config.pipeline_parallel_size)
        if start.cpus:
            os.sched_setaffinity(0, start.cpus)
        threading.Thread(target=self._send_heartbeats, name="rank-heartbeat", daemon=True).start()

    @property
    def runner_options(self) -> RunnerOptions:
        """The options of the rank's runner."""
        return replace(self.config.runner_options, layout=self.layout)

    def join(self, runner: Runner) -> Runner:
        """Connect the rank's runner to the other ranks, when all have loaded; returns the runner that uses all ranks.

        Raises `EngineError` if the runner cannot be one of several ranks. Ends the process if another rank fails.
        """
        if not isinstance(runner, SpecRunner) or "ranks" not in runner.capabilities:
            raise EngineError(f"the runner {runner.name} cannot be split among ranks")
        if self.rank == 0 and self.layout.size > 1:
            self._plans = PlanSender(self._plan_address())
        block_bytes = runner.cache_bytes_per_block(self.config.scheduler.block_size)
        self._control.tell(
            Loaded(
                checkpoint=checkpoint_checksum(Path(self.config.model)),
                isa=_native.default_isa(),
                block_bytes=block_bytes,
                free_memory=runner.free_memory(),
                shares_memory=runner.shares_memory,
                address="" if self._plans is None else self._plans.address,
            )
        )
        ready = self._next()
        assert isinstance(ready, Connect)
        timeout = self.config.rank_start_timeout
        if self._plans is None:
            plans = PlanReceiver(self._reachable(ready.plan_address), ready.token, timeout)
        else:
            self._plans.accept(self.layout.size - 1, ready.token, timeout)
        self._connect_runner(runner)
        if self._plans is None:
            follow(runner, plans, self.layout.pipeline_parallel)
            return runner
        self._ranked = RankedRunner(
            *(runner, self._plans, self.layout.pipeline_parallel),
            *(ready.block_bytes, ready.free_memory, self.fail),
        )
        return self._ranked

    def close(self) -> None:
        """End the other ranks if this is rank 0, and leave. Returns when all ranks have left MPI."""
        if self._ranked is not None:
            self._ranked.stop()
        self._control.tell(Leaving())
        if self._connected:
            from neso.engine.parallel import mpi

            mpi.finalize()

    def fail(self, error: BaseException) -> NoReturn:
        """Report an error to the supervisor, which ends all ranks, and end this process."""
        is_expected = isinstance(error, EngineError)
        message = str(error) if is_expected else f"{type(error).__name__}: {error}"
        logger.error("rank %d failed: %s", self.rank, message, exc_info=None if is_expected else error)
        try:
            self._control.tell(Failed(message))
            time.sleep(_CONNECT_TIMEOUT)  # the supervisor ends this process
        finally:
            os._exit(FAILED_STATUS)

    def _connect_runner(self, runner: SpecRunner) -> None:
        if started_by_torchrun():
            from neso.engine.parallel.torch_communicator import TorchCommunicator

            runner.connect(TorchCommunicator(self.layout))
            return
        from neso.engine.parallel.mpi import MpiCommunicator

        communicator = MpiCommunicator(self.layout)
        self._connected = True
        runner.connect(communicator)

    def _plan_address(self) -> str:
        if Path(self._address).is_absolute():
            return f"{self._address}.plans"
        return f"{split_address(self._address)[0]}:0"

    def _reachable(self, address: str) -> str:
        """Return the address of rank 0's plans as seen from this host: the port, at the host of the supervisor."""
        return self._address.rpartition(":")[0] + address if address.startswith(":") else address

    def _next(self) -> ToRank:
        return self._messages.get()

    def _read(self) -> None:
        """Pass messages of the supervisor on; end this process when the supervisor has ended."""
        try:
            while True:
                self._messages.put(self._control.next())
        except (OSError, msgspec.MsgspecError):
            os._exit(FAILED_STATUS)

    def _send_heartbeats(self) -> None:
        interval = heartbeat_interval(self.config.heartbeat_timeout or 8.0)
        try:
            while True:
                self._control.tell(Alive())
                time.sleep(interval)
        except OSError:
            os._exit(FAILED_STATUS)


def _library() -> tuple[str, EngineError | None]:
    """Return name and version of the library that connects the ranks, and why it cannot, if so."""
    if started_by_torchrun():
        return f"torch {importlib.metadata.version('torch')}", None
    try:
        from neso.engine.parallel.mpi import library_version

        library = library_version()
        check_launcher(library)
    except EngineError as error:
        return library, error
    except (ImportError, RuntimeError) as error:
        return "none", missing_library(error)
    return library, None


def host_id() -> str:
    """Return the name of this host and the id of its running kernel."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


def checkpoint_checksum(model: Path) -> str:
    """Return a checksum of the files that describe a checkpoint; of a GGUF file, its size.

    Weight files don't count, because a host needs only the files of its ranks.
    """
    if model.is_file():
        return f"{model.stat().st_size} bytes"
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, INDEX_FILE):
        if (model / name).is_file():
            digest.update((model / name).read_bytes())
    return digest.hexdigest()[:16]
