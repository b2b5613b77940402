"""Supervisor of the ranks of a model: `python -m neso.engine.parallel.supervisor ADDRESS STATUS_FD CONFIG_JSON`.

The engine's client starts it instead of an engine process, with the same arguments. It starts the ranks, or waits for
those of a launcher, compares them, and ends all of them when one ends, hangs or fails. It reports the reason to the
client and ends; the client loads the model again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

import neso
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.host_resources import parse_cpu_list, split_cpus
from neso.engine.ipc.heartbeat import end_report, heartbeat_interval
from neso.engine.parallel.control import (
    Connect,
    Failed,
    FromRank,
    Hello,
    Leaving,
    Loaded,
    Start,
    SupervisorConnection,
    close_listener,
    listen,
)
from neso.engine.parallel.handshake import HANDSHAKE_TIMEOUT, HandshakeError, RankHandshake, rank_secret
from neso.engine.parallel.launcher import (
    die_with_parent,
    launcher_sockets,
    mpiexec_command,
    own_environment,
)

logger = logging.getLogger(__name__)

_LEAVE_TIMEOUT = 10.0
"""Seconds that the other ranks have to exit after rank 0."""
_LAST_MESSAGES = 0.5
"""Seconds to wait for messages from ranks after their launcher has exited."""
_NUM_CHECKS = 4
"""Heartbeat checks within the timeout."""
MAX_STRANGERS = 64
"""Connections beyond the number of ranks that may be in a handshake; further ones are closed."""


class RankFailure(Exception):
    """The ranks cannot start or continue; the message names the rank."""


@dataclass
class Rank:
    """State of a rank. `silent_checks`: number of heartbeat checks since its last message."""

    connection: SupervisorConnection
    hello: Hello
    loaded: Loaded | None = None
    left: bool = False
    ended: bool = False
    silent_checks: int = 0

    def __str__(self) -> str:
        return f"rank {self.hello.rank} (process {self.hello.pid} on {self.hello.host.split(' ')[0]})"


class Supervisor:
    """Single-threaded. `run` returns when all ranks have left, and raises `RankFailure`."""

    def __init__(self, config: EngineConfig, engine_address: str, beat: Callable[[], None]) -> None:
        self._config, self._engine_address, self._beat = config, engine_address, beat
        self._selector = selectors.DefaultSelector()
        self._handshakes: list[RankHandshake] = []
        self._ranks: dict[int, Rank] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._started = self._connected = False
        self._leaving_since: float | None = None
        self._launcher_ended: float | None = None
        self._next_check = time.monotonic()
        self._listener = self._listen()

    def run(self) -> None:
        """Start the ranks and watch them. Raises `RankFailure`, `EngineError`."""
        self._launcher = self._launch()
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        interval = heartbeat_interval(self._config.heartbeat_timeout or 8.0)
        deadline = time.monotonic() + self._config.rank_start_timeout
        while not self._all_left():
            for key, _ in self._selector.select(interval):
                if key.fileobj == sys.stdin.fileno():
                    if not os.read(sys.stdin.fileno(), 1):
                        return  # the client has ended
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            self._beat()
            self._check_ends()
            for handshake in [each for each in self._handshakes if each.is_late]:
                self._close_stranger(handshake, f"no answer in {HANDSHAKE_TIMEOUT:g} s")
            if not self._connected and time.monotonic() > deadline:
                raise RankFailure(self._late_ranks())
            if time.monotonic() >= self._next_check:
                self._check_heartbeats()
                self._next_check = time.monotonic() + self._silence_limit / _NUM_CHECKS

    def end_ranks(self) -> None:
        """End all ranks that still run, and the launcher."""
        for rank in self._ranks.values():
            rank.connection.close()  # ranks on other hosts exit when it is closed
            if not rank.ended and self._is_child(rank.hello.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.hello.pid, signal.SIGKILL)
        for handshake in self._handshakes:
            handshake.connection.close()
        self._close_listener()
        if self._launcher is None:
            return
        try:
            self._launcher.wait(2.0)
        except subprocess.TimeoutExpired:
            self._launcher.terminate()
            try:
                self._launcher.wait(2.0)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()

    # -- start --------------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        address = self._config.rank_address
        self._address = address or str(_directory(self._engine_address) / "control")
        self._secret = rank_secret(self._address)
        try:
            listener = listen(self._address)
        except (OSError, ValueError) as error:
            raise EngineError(f"rank_address {self._address}: {error}") from None
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return listener

    def _launch(self) -> subprocess.Popen[bytes]:
        """Start all ranks by mpiexec; with `rank_address`, only rank 0, whose launcher has started this process."""
        rank = [sys.executable, "-m", "neso.engine.parallel.rank_process", self._address]
        if self._config.rank_address is not None:
            return subprocess.Popen(rank, stdin=subprocess.DEVNULL, pass_fds=launcher_sockets(self._config))
        return subprocess.Popen(
            [*mpiexec_command(self._config.num_ranks), *rank],
            stdin=subprocess.DEVNULL,
            env=own_environment(),
            start_new_session=True,  # Ctrl-C would end the ranks at once
            preexec_fn=die_with_parent,
        )

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:
            return  # the last rank has just connected, or the other side has closed the connection
        if len(self._handshakes) >= self._config.num_ranks + MAX_STRANGERS:
            connected.close()
            return
        handshake = RankHandshake(SupervisorConnection(connected), self._secret)
        self._handshakes.append(handshake)
        self._selector.register(connected, selectors.EVENT_READ, handshake)

    def _read(self, source: RankHandshake | Rank) -> None:
        """Read from a rank, or from a connection that has not proven to be from one."""
        if isinstance(source, RankHandshake):
            try:
                for message in source.connection.feed():
                    hello = source.advance(message)
                    if hello is not None:
                        self._admit(source, hello)
                        return  # a rank sends nothing more before it receives `Start`
            except (OSError, msgspec.MsgspecError, HandshakeError) as error:
                self._close_stranger(source, str(error))
            return
        try:
            messages = source.connection.feed()
        except (OSError, msgspec.MsgspecError):
            self._selector.unregister(source.connection.socket)
            source.connection.close()
            source.ended = True
            return
        for message in messages:
            self._handle(source, message)

    def _close_stranger(self, handshake: RankHandshake, reason: str) -> None:
        logger.warning("closed a connection to the control channel of ranks: %s", reason)
        self._handshakes.remove(handshake)
        self._selector.unregister(handshake.connection.socket)
        handshake.connection.close()

    def _admit(self, handshake: RankHandshake, hello: Hello) -> None:
        """Register a new rank. Raises `HandshakeError`, and `RankFailure` if the rank does not fit the model."""
        if not 0 <= hello.rank < self._config.num_ranks or hello.rank in self._ranks:
            raise HandshakeError("not from a rank of this model")
        self._handshakes.remove(handshake)
        rank = self._ranks[hello.rank] = Rank(handshake.connection, hello)
        self._selector.modify(rank.connection.socket, selectors.EVENT_READ, rank)
        if hello.size != self._config.num_ranks:
            raise RankFailure(
                f"{rank} is one of {hello.size} ranks, tensor_parallel_size and pipeline_parallel_size "
                f"need {self._config.num_ranks}"
            )
        if hello.version != neso.__version__:
            raise RankFailure(f"{rank} runs neso {hello.version}, the server {neso.__version__}")
        if len(self._ranks) == self._config.num_ranks:
            self._start()

    def _start(self) -> None:
        """Tell all ranks to load their weights, each on its own cores."""
        self._close_listener()
        self._require_equal("uses the MPI library", lambda rank: rank.hello.library)
        cpus = self._split_cpus()
        config = msgspec.json.encode(self._config).decode()
        for number, rank in self._ranks.items():
            address = self._engine_address if number == 0 else ""
            self._tell(rank, Start(config, address, cpus.get(number, [])))
        self._started = True

    def _split_cpus(self) -> dict[int, list[int]]:
        """Return the CPUs of each rank: those of its host, divided, unless its launcher has divided them."""
        hosts: dict[str, list[Rank]] = {}
        for rank in sorted(self._ranks.values(), key=lambda rank: rank.hello.rank):
            hosts.setdefault(rank.hello.host, []).append(rank)
        here = next((rank.hello.host for rank in self._ranks.values() if rank.hello.rank == 0), "")
        found: dict[int, list[int]] = {}
        for host, ranks in hosts.items():
            shared = len({tuple(rank.hello.cpus) for rank in ranks}) == 1 and len(ranks) > 1
            if shared and host == here:  # the topology of other hosts is not known here
                parts = split_cpus(len(ranks), cpus=ranks[0].hello.cpus)
                found |= {rank.hello.rank: part for rank, part in zip(ranks, parts, strict=True)}
        return found

    def _connect(self) -> None:
        """All ranks have loaded: compare them, and connect them."""
        self._require_equal("has a checkpoint with the checksum", lambda rank: _loaded(rank).checkpoint)
        self._require_equal("uses the instruction set", lambda rank: _loaded(rank).isa)
        ranks = list(self._ranks.values())
        on_host = {
            host: sum(rank.hello.host == host for rank in ranks) for host in {r.hello.host for r in ranks}
        }
        message = Connect(
            plan_address=_loaded(self._ranks[0]).address,
            token=secrets.token_hex(16),
            block_bytes=max(_loaded(rank).block_bytes for rank in ranks),
            free_memory=min(
                _loaded(rank).free_memory // (on_host[rank.hello.host] if _loaded(rank).shares_memory else 1)
                for rank in ranks
            ),
        )
        for rank in ranks:
            self._tell(rank, message)
        self._connected = True
        # The limit is shorter from now on.
        self._next_check = time.monotonic() + self._silence_limit / _NUM_CHECKS
        for rank in ranks:
            rank.silent_checks = 0

    def _require_equal(self, what: str, value: Callable[[Rank], str]) -> None:
        first = self._ranks[0]
        for rank in self._ranks.values():
            if value(rank) != value(first):
                raise RankFailure(f"{rank} {what} {value(rank)}, {first} {value(first)}")

    def _tell(self, rank: Rank, message: Start | Connect) -> None:
        try:
            rank.connection.tell(message)
        except OSError:
            rank.ended = True

    # -- life ---------------------------------------------------------------------------------------------------

    def _handle(self, rank: Rank, message: FromRank) -> None:
        rank.silent_checks = 0
        match message:
            case Failed(text):
                raise RankFailure(f"{rank}: {text}")
            case Leaving():
                rank.left = True
                if rank.hello.rank == 0:
                    self._leaving_since = time.monotonic()
            case Loaded():
                rank.loaded = message
                if all(other.loaded is not None for other in self._ranks.values()):
                    self._connect()

    def _check_ends(self) -> None:
        """Raise `RankFailure` if a rank or the launcher has ended, or if ranks do not end."""
        if self._leaving_since is not None:
            if time.monotonic() > self._leaving_since + _LEAVE_TIMEOUT:
                raise RankFailure("some ranks did not end with rank 0 and were killed")
            return
        ended = [rank for rank in self._ranks.values() if rank.ended and not rank.left]
        if ended:
            raise RankFailure(f"{', '.join(map(str, ended))} ended unexpectedly")
        if self._launcher is not None and self._launcher.poll() is not None:
            self._launcher_ended = self._launcher_ended or time.monotonic()
            if time.monotonic() < self._launcher_ended + _LAST_MESSAGES:
                return  # messages of its ranks may still arrive
            status = self._launcher.returncode
            missing = sorted(set(range(self._config.num_ranks)) - self._ranks.keys())
            where = f"rank {', '.join(map(str, missing))} did not start" if missing else "all ranks ended"
            raise RankFailure(f"{where}: the launcher ended with status {status}")

    @property
    def _silence_limit(self) -> float:
        """Seconds without a message after which a rank hangs. Imports from a slow disk block all threads of a rank."""
        limit = self._config.heartbeat_timeout or 1e9
        return limit if self._connected else max(limit, self._config.step_timeout)

    def _check_heartbeats(self) -> None:
        # Checks are counted instead of time, which also passes while this process is stopped.
        for rank in self._ranks.values():
            rank.silent_checks += 1
            if self._started and not rank.left and rank.silent_checks > _NUM_CHECKS:
                raise RankFailure(f"{rank} did not respond for {self._silence_limit:g} s and was killed")

    def _late_ranks(self) -> str:
        numbers = range(self._config.num_ranks)
        missing = [number for number in numbers if number not in self._ranks]
        late = missing or [n for n in numbers if self._ranks[n].loaded is None]
        what = "did not start" if missing else "did not load its weights"
        return f"rank {', '.join(map(str, late))} {what} in {self._config.rank_start_timeout:g} s (rank_start_timeout)"

    def _all_left(self) -> bool:
        return (
            self._leaving_since is not None
            and all(rank.ended for rank in self._ranks.values())
            and (self._launcher is None or self._launcher.poll() is not None)
        )

    def _is_child(self, pid: int) -> bool:
        """Whether the process was started by this supervisor; ranks of other hosts have pids of their own."""
        try:
            for _ in range(8):
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if pid == os.getpid():
                    return True
        except (OSError, ValueError):
            return False
        return False

    def _close_listener(self) -> None:
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            close_listener(self._listener)


def _loaded(rank: Rank) -> Loaded:
    assert rank.loaded is not None
    return rank.loaded


def _directory(engine_address: str) -> Path:
    return Path(engine_address.removeprefix("ipc://")).parent


def main(engine_address: str, status_fd: str, config_json: str) -> int:
    """Run the ranks of one model; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fd = int(status_fd)
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)

    def write(message: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # a stopped client does not read
            os.write(fd, message)

    config = msgspec.json.decode(config_json, type=EngineConfig)
    if config.cpus is not None:  # the ranks on this host divide them
        os.sched_setaffinity(0, parse_cpu_list(config.cpus))
    if config.rank_address is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers signal all processes; the server decides
    supervisor = None
    try:
        supervisor = Supervisor(config, engine_address, lambda: write(b"."))
        supervisor.run()
        return 0
    except (RankFailure, EngineError) as failure:
        logger.error("%s", failure)
        if supervisor is not None:
            supervisor.end_ranks()
        write(end_report(str(failure)))
        return 1
    finally:
        if supervisor is not None:
            supervisor.end_ranks()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
