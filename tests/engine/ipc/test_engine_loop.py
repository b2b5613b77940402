"""EngineLoop on a fake model: failed and invalid commands are answered and do not affect others."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from fake_engine import expected_tokens, make_core, make_request

from neso.engine.ipc.clients import EngineClients
from neso.engine.ipc.engine_process import EngineLoop
from neso.engine.ipc.messages import (
    Abort,
    Add,
    Attach,
    CheckIntegrity,
    Detach,
    EngineInfo,
    Integrity,
    LoadLora,
    LoraDone,
    Shutdown,
    StepOutputs,
    client_prefix,
    command_encoder,
    event_decoder,
)
from neso.generation import FinishReason, LoraRequest

INFO = EngineInfo("fake", 128, 8, 100, 16, 4, 1024, 0.1)


@pytest.fixture
def loop():
    """Yield (core, server end of the socket)."""
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://loop")
    theirs.connect("inproc://loop")
    ours.setsockopt(zmq.RCVTIMEO, 60_000)
    core = make_core()
    watchdog = SimpleNamespace(begin=lambda: None, end=lambda: None)
    thread = threading.Thread(target=EngineLoop(EngineClients(theirs), core, INFO, watchdog).run)
    thread.start()
    yield core, ours
    ours.send(command_encoder.encode([Shutdown()]))
    thread.join(60)
    assert not thread.is_alive()
    ours.close(0)
    theirs.close(0)
    context.term()


def answers(socket, expected):
    """Return the messages until all requests have ended."""
    reported = {}
    while not all(name in reported and reported[name][-1].finish_reason for name in expected):
        event = event_decoder.decode(socket.recv())
        for output in event.outputs if isinstance(event, StepOutputs) else ():
            reported.setdefault(output.request_id, []).append(output)
    return reported


def assert_serves(socket, name="good"):
    reported = answers(socket, {name})
    tokens = [token for output in reported[name] for token in output.token_ids]
    assert tokens == expected_tokens([1, 2], 8)
    return reported


@pytest.mark.parametrize("method", ["add", "abort"])
def test_a_failed_command_is_reported_and_others_run(loop, monkeypatch, method):
    core, socket = loop
    working = getattr(core, method)

    def fail_for_one(what, *args):
        if getattr(what, "request_id", what) == "bad":
            raise RuntimeError("a defect")
        return working(what, *args)

    monkeypatch.setattr(core, method, fail_for_one)
    bad = Add(make_request("bad", [3])) if method == "add" else Abort("bad")
    socket.send(command_encoder.encode([bad, Add(make_request("good", [1, 2]))]))
    reported = assert_serves(socket)
    if method == "add":
        assert [(o.finish_reason, o.error) for o in reported["bad"]] == [
            (FinishReason.ERROR, "the engine failed: a defect")
        ]


def test_an_invalid_command_is_reported(loop):
    _, socket = loop
    bad = msgspec.structs.replace(make_request("bad", [3]), priority=0.5)
    load = LoadLora(7, LoraRequest(name="x", path="y"))
    load = msgspec.structs.replace(load, lora=["no", "adapter"])
    socket.send(command_encoder.encode([Add(bad), load, Add(make_request("good", [1, 2]))]))
    event = event_decoder.decode(socket.recv())
    assert isinstance(event, LoraDone) and event.number == 7 and "cannot read" in event.message
    (output,) = assert_serves(socket)["bad"]
    assert output.finish_reason is FinishReason.ERROR and "cannot read" in output.error


def test_an_error_of_the_integrity_check_is_reported(loop, monkeypatch):
    core, socket = loop

    def fail():
        raise KeyError("a defect")

    monkeypatch.setattr(core, "check_integrity", fail)
    socket.send(command_encoder.encode([CheckIntegrity()]))
    event = event_decoder.decode(socket.recv())
    assert isinstance(event, Integrity) and "a defect" in event.message


@pytest.fixture
def second(loop, tmp_path):
    """The socket of a second client."""
    _core, socket = loop
    other = zmq.Context.instance().socket(zmq.PAIR)
    other.setsockopt(zmq.RCVTIMEO, 60_000)
    address = f"ipc://{tmp_path}/client"
    other.bind(address)
    socket.send(command_encoder.encode([Attach(1, address)]))
    assert event_decoder.decode(other.recv()) == INFO
    yield other
    other.close(0)


def test_each_client_gets_its_own_outputs(loop, second):
    _core, socket = loop
    name = f"{client_prefix(1)}same"
    socket.send(command_encoder.encode([Add(make_request("same", [1, 2], max_tokens=8))]))
    second.send(command_encoder.encode([Add(make_request(name, [1, 2], max_tokens=8))]))
    assert answers(second, {name}).keys() == {name}
    assert answers(socket, {"same"}).keys() == {"same"}


def test_detaching_a_client_aborts_its_requests_only(loop, second):
    _core, socket = loop
    name = f"{client_prefix(1)}endless"
    second.send(command_encoder.encode([Add(make_request(name, [1, 2], max_tokens=10**6))]))
    event_decoder.decode(second.recv())  # it runs
    socket.send(command_encoder.encode([Detach(1), Add(make_request("good", [1, 2], max_tokens=8))]))
    assert_serves(socket)
    socket.send(command_encoder.encode([CheckIntegrity()]))
    while not isinstance(event := event_decoder.decode(socket.recv()), Integrity):
        pass
    assert not event.message and event.stats.num_requests == 0 and event.stats.num_used_blocks == 0
