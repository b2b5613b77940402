"""KV transfers of an engine with a command loop: commands for leases, and leases that end while the engine is idle."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import zmq
from fake_engine import make_request
from transfer_engines import TransferEngine

from neso.engine.core.request import KvExport
from neso.engine.ipc.clients import EngineClients
from neso.engine.ipc.engine_process import EngineLoop
from neso.engine.ipc.messages import (
    Add,
    Command,
    EngineInfo,
    ExtendLease,
    ReleaseLease,
    Shutdown,
    StepOutputs,
    command_encoder,
    event_decoder,
)

PROMPT = list(range(1, 23))
INFO = EngineInfo("fake", 128, 8, 100, 16, 4, 1024, 0.1)


class RunningLoop:
    """An engine loop in a thread, and the socket of its client."""

    def __init__(self, socket: zmq.Socket) -> None:
        self.socket = socket

    def send(self, *commands: Command) -> None:
        self.socket.send(command_encoder.encode(list(commands)))

    def wait_for(self, condition) -> StepOutputs:
        while True:
            event = event_decoder.decode(self.socket.recv())
            if isinstance(event, StepOutputs) and condition(event):
                return event

    def export(self, lease: float) -> None:
        request = make_request("r", PROMPT).prefill_only(KvExport("t", lease))
        self.send(Add(request))
        event = self.wait_for(lambda event: event.outputs)
        assert event.outputs[0].exported_tokens == 20

    def wait_until_free(self) -> StepOutputs:
        return self.wait_for(lambda event: event.stats.num_used_blocks == 0)


@pytest.fixture
def loop():
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://loop")
    theirs.connect("inproc://loop")
    ours.setsockopt(zmq.RCVTIMEO, 60_000)
    engine = TransferEngine()
    watchdog = SimpleNamespace(begin=lambda: None, end=lambda: None)
    thread = threading.Thread(target=EngineLoop(EngineClients(theirs), engine.core, INFO, watchdog).run)
    thread.start()
    running = RunningLoop(ours)
    yield running
    running.send(Shutdown())
    thread.join(60)
    assert not thread.is_alive()
    engine.core.close()
    ours.close(0)
    theirs.close(0)
    context.term()


def test_lease_that_expires_frees_blocks_of_an_idle_engine(loop):
    loop.export(lease=0.05)
    assert loop.wait_until_free().stats.kv_transfer.expired_leases == 1


def test_released_lease_frees_blocks(loop):
    loop.export(lease=600.0)
    loop.send(ReleaseLease("unknown"), ReleaseLease("t"))
    stats = loop.wait_until_free().stats.kv_transfer
    assert (stats.leases, stats.expired_leases) == (0, 0)


def test_lease_is_shortened(loop):
    loop.export(lease=600.0)
    loop.send(ExtendLease("unknown", 1.0), ExtendLease("t", 0.05))
    assert loop.wait_until_free().stats.kv_transfer.expired_leases == 1
