"""The supervisor of ranks, with ranks that only speak the control protocol."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port
from msgspec.structs import replace

import neso
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.parallel.control import (
    MAX_UNKNOWN_MESSAGE,
    Alive,
    Answer,
    Challenge,
    Connect,
    Failed,
    Hello,
    Leaving,
    Loaded,
    RankConnection,
    Start,
    SupervisorConnection,
    close_listener,
    connect,
    listen,
)
from neso.engine.parallel.handshake import (
    SECRET_VARIABLE,
    HandshakeError,
    RankHandshake,
    introduce,
    rank_secret,
)
from neso.engine.parallel.supervisor import RankFailure, Supervisor

HELLO = Hello(0, 2, os.getpid(), "host", [0, 1], neso.__version__, "MPI 1", b"once")
LOADED = Loaded(checkpoint="c", isa="avx2", block_bytes=100, free_memory=1000, address=":1")


class Running:
    """A supervisor in a thread. `client`: the end of its standard input that the client holds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.launcher = subprocess.Popen(["sleep", "60"])
        monkeypatch.setattr(Supervisor, "_launch", lambda _: self.launcher)
        read, self.client = os.pipe()
        self._stdin = os.fdopen(read)
        monkeypatch.setattr("sys.stdin", self._stdin)
        config = EngineConfig.from_options("model", {"tensor_parallel_size": 2, **options})
        self.supervisor = Supervisor(config, f"ipc://{folder}/engine", lambda: None)
        self.address = config.rank_address or str(folder / "control")
        self.failure = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def rank(self, number: int, **fields: Any) -> RankConnection:
        connection = self.stranger()
        introduce(connection, replace(HELLO, rank=number, **fields), rank_secret(self.address))
        connection.socket.settimeout(30)
        return connection

    def stranger(self) -> RankConnection:
        """Connect without a handshake."""
        connection = RankConnection(connect(self.address, 10))
        connection.socket.settimeout(30)
        return connection

    def started(self) -> list[RankConnection]:
        """Return two ranks that have been told to load."""
        ranks = [self.rank(0), self.rank(1)]
        for rank in ranks:
            assert isinstance(rank.next(), Start)
        return ranks

    def join(self) -> str:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.failure

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        if self._thread.is_alive():
            os.close(self.client)
            self._thread.join(30)
        self._stdin.close()

    def _run(self) -> None:
        try:
            self.supervisor.run()
        except RankFailure as failure:
            self.failure = str(failure)
        finally:
            self.launcher.kill()
            self.supervisor.end_ranks()


@pytest.fixture
def run(tmp_path, monkeypatch) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(**options: Any) -> Running:
        running.append(Running(tmp_path, monkeypatch, **options))
        return running[-1]

    yield start
    for each in running:
        each.close()


def test_ranks_are_connected_when_all_have_loaded(run):
    ranks = run().started()
    ranks[0].tell(LOADED)
    ranks[1].tell(replace(LOADED, block_bytes=300, free_memory=800))
    messages = [rank.next() for rank in ranks]
    assert messages[0] == messages[1] and isinstance(messages[0], Connect)
    # Two ranks share the memory of their host.
    assert (messages[0].plan_address, messages[0].block_bytes, messages[0].free_memory) == (":1", 300, 400)


def test_the_memory_of_gpus_is_not_divided_by_the_ranks_of_a_host(run):
    ranks = run().started()
    ranks[0].tell(replace(LOADED, shares_memory=False))
    ranks[1].tell(replace(LOADED, shares_memory=False, free_memory=800))
    assert [rank.next().free_memory for rank in ranks] == [800, 800]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": "0.0.1"}, "runs neso 0.0.1"),
        ({"library": "MPI 2"}, "uses the MPI library MPI 2"),
        ({"size": 3}, "is one of 3 ranks"),
    ],
)
def test_ranks_that_differ_are_a_start_error(run, fields, message):
    supervisor = run()
    ranks = [supervisor.rank(0), supervisor.rank(1, **fields)]
    failure = supervisor.join()
    assert failure.startswith("rank 1 (process") and message in failure
    assert len(ranks) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"checkpoint": "d"}, "checkpoint with the checksum d"), ({"isa": "avx512"}, "instruction set avx512")],
)
def test_ranks_with_other_files_or_processors_are_a_start_error(run, fields, message):
    supervisor = run()
    ranks = supervisor.started()
    ranks[0].tell(LOADED)
    ranks[1].tell(replace(LOADED, **fields))
    assert message in supervisor.join()


def test_error_of_a_rank_is_reported_with_its_number(run):
    supervisor = run()
    ranks = supervisor.started()
    ranks[1].tell(Failed("no such tensor"))
    failure = supervisor.join()
    assert failure.startswith("rank 1 (process") and failure.endswith("no such tensor")


def test_rank_that_ends_is_reported(run):
    supervisor = run()
    ranks = supervisor.started()
    ranks[1].close()
    failure = supervisor.join()
    assert failure.startswith("rank 1 (process") and "ended unexpectedly" in failure


def test_rank_that_is_silent_is_reported(run):
    supervisor = run(heartbeat_timeout=0.4)  # step_timeout is the limit until the ranks have loaded
    ranks = supervisor.started()
    for rank in ranks:
        rank.tell(LOADED)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.02):
            try:
                ranks[0].tell(Alive())
            except OSError:
                return

    beating = threading.Thread(target=beat)
    beating.start()
    failure = supervisor.join()
    stop.set()
    beating.join()
    assert failure.startswith("rank 1 (process") and "did not respond for 0.4 s" in failure


@pytest.mark.parametrize("connected", [0, 1])
def test_start_has_a_deadline(run, connected):
    supervisor = run(rank_start_timeout=0.3)
    ranks = [supervisor.rank(number) for number in range(connected)]
    assert "did not start in 0.3 s (rank_start_timeout)" in supervisor.join()
    assert len(ranks) == connected


def test_launcher_that_ends_is_reported(run):
    supervisor = run()
    supervisor.launcher.kill()
    assert "rank 0, 1 did not start: the launcher ended" in supervisor.join()


def test_connections_of_others_are_closed_without_effect(run):
    supervisor = run()
    stranger = supervisor.rank(7)
    with pytest.raises(OSError):
        stranger.next()
    supervisor.stranger().close()
    supervisor.started()


SECRET = "the secret of the tests"


@pytest.fixture
def run_tcp(run, monkeypatch) -> Callable[..., Running]:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    return lambda: run(rank_address=f"127.0.0.1:{free_port()}")


def test_ranks_with_another_secret_cannot_join(run_tcp):
    supervisor = run_tcp()
    rank = supervisor.stranger()
    with pytest.raises(HandshakeError, match=SECRET_VARIABLE):
        introduce(rank, HELLO, b"another secret of the tests")
    supervisor.started()


@pytest.mark.parametrize("message", [Answer(b""), LOADED, Failed("stop"), Leaving()])
@pytest.mark.parametrize("greets", [False, True])
def test_messages_without_the_secret_have_no_effect(run_tcp, message, greets):
    supervisor = run_tcp()
    stranger = supervisor.stranger()
    if greets:
        stranger.tell(HELLO)
        assert isinstance(stranger.next(), Challenge)
    stranger.tell(message)
    with pytest.raises(OSError):
        stranger.next()
    supervisor.started()


def test_recorded_handshake_cannot_be_repeated():
    secret, sent = SECRET.encode(), list[Any]()

    def connected() -> tuple[RankHandshake, RankConnection]:
        here, there = socket.socketpair()
        return RankHandshake(SupervisorConnection(here), secret), RankConnection(there)

    class Recorder(RankConnection):
        def tell(self, message: Any) -> None:
            sent.append(message)
            known.append(first.advance(message))

    known: list[Hello | None] = []
    first, rank = connected()
    introduce(Recorder(rank.socket), HELLO, secret)
    assert known == [None, HELLO]
    second, other = connected()
    assert second.advance(sent[0]) is None
    with pytest.raises(HandshakeError, match=SECRET_VARIABLE):
        second.advance(sent[1])
    for end in (rank, other, first.connection, second.connection):
        end.close()


def test_long_messages_and_late_answers_of_strangers(run_tcp, monkeypatch):
    supervisor = run_tcp()
    stranger = supervisor.stranger()
    stranger.send(bytes(MAX_UNKNOWN_MESSAGE + 1))
    with pytest.raises(OSError):
        stranger.next()
    monkeypatch.setattr("neso.engine.parallel.handshake.HANDSHAKE_TIMEOUT", 0.0)
    silent = supervisor.stranger()
    with pytest.raises(OSError):
        silent.next()


def test_number_of_strangers_is_limited(run_tcp, monkeypatch):
    monkeypatch.setattr("neso.engine.parallel.supervisor.MAX_STRANGERS", 1)
    supervisor = run_tcp()
    accepted = [supervisor.stranger() for _ in range(3)]
    refused = supervisor.stranger()
    with pytest.raises(OSError):
        refused.next()
    for connection in accepted:
        connection.close()


def test_supervisor_with_another_secret_cannot_start_ranks(tmp_path):
    listener = listen(str(tmp_path / "control"))
    rank = RankConnection(connect(str(tmp_path / "control"), 10))
    other = SupervisorConnection(listener.accept()[0])
    other.tell(Challenge(b"nonce", b"proof"))
    with pytest.raises(HandshakeError):
        introduce(rank, HELLO, b"")
    close_listener(listener)
    rank.close()
    other.close()


@pytest.mark.parametrize(("secret", "message"), [("", "is not set"), ("short", "has only 5 characters")])
def test_tcp_needs_a_secret(run, monkeypatch, secret, message):
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with pytest.raises(EngineError, match=f"NESO_RANK_SECRET {message}"):
        run(rank_address="127.0.0.1:0")


def test_supervisor_ends_when_all_ranks_have_left(run):
    supervisor = run()
    ranks = supervisor.started()
    for rank in ranks:
        rank.tell(Leaving())
        rank.close()
    supervisor.launcher.kill()
    assert supervisor.join() == ""


def test_supervisor_ends_with_its_client(run):
    supervisor = run()
    ranks = supervisor.started()
    os.close(supervisor.client)
    assert supervisor.join() == ""
    with pytest.raises(OSError):
        ranks[1].next()
