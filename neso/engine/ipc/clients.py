"""The clients of an engine: the server process that started it, and front-end processes that use it too."""

from __future__ import annotations

import contextlib
from collections import defaultdict

import zmq

from neso.engine.core.request import SequenceOutput
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import (
    SERVER,
    Attach,
    Command,
    Event,
    InvalidCommand,
    StepOutputs,
    client_of,
    decode_commands,
    event_encoder,
)
from neso.engine.wake_up import WakeUp


class EngineClients:
    """A pair socket to each client. Outputs are sent to the client that the request id names, see `client_prefix`."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._sockets = {SERVER: socket}
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self.wake_up = WakeUp()
        """Lets `receive` return without a command."""
        self._poller.register(self.wake_up, zmq.POLLIN)

    def receive(self, *, block: bool) -> list[Command | InvalidCommand]:
        """Return all pending commands; with `block`, wait until there is one or it is woken."""
        if block:
            self._poller.poll()
            self.wake_up.clear()
        commands: list[Command | InvalidCommand] = []
        for socket in self._sockets.values():
            with contextlib.suppress(zmq.Again):
                while True:
                    commands += decode_commands(socket.recv(zmq.NOBLOCK))
        return commands

    def attach(self, command: Attach, *first: Event) -> None:
        """Connect to a client and send it the `first` events."""
        self.detach(command.client)
        socket = self._sockets[SERVER].context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.connect(command.address)
        self._sockets[command.client] = socket
        self._poller.register(socket, zmq.POLLIN)
        for event in first:
            socket.send(
                event_encoder.encode(event)
            )  # the client listens, so this waits for the connection only

    def detach(self, client: int) -> None:
        """Close the socket of a client, if it is attached."""
        socket = self._sockets.pop(client, None)
        if socket is not None:
            self._poller.unregister(socket)
            socket.close(linger=0)

    def send(self, event: Event) -> None:
        """Send an event to the server process."""
        _send(self._sockets[SERVER], event)

    def send_all(self, event: Event) -> None:
        """Send an event to all clients."""
        for socket in self._sockets.values():
            _send(socket, event)

    def send_step(self, outputs: list[SequenceOutput], stats: EngineStats) -> None:
        """Send the outputs of a step to their clients. The server process gets the statistics of each step."""
        if len(self._sockets) == 1:
            self.send(StepOutputs(outputs, stats))
            return
        by_client: defaultdict[int, list[SequenceOutput]] = defaultdict(list)
        by_client[SERVER] = []
        for output in outputs:
            by_client[client_of(output.request_id)].append(output)
        for client, own in by_client.items():
            if client in self._sockets:
                _send(self._sockets[client], StepOutputs(own, stats))

    def close(self) -> None:
        """Close all sockets, after sending what is pending."""
        for socket in self._sockets.values():
            socket.close(linger=1000)
        self.wake_up.close()


def _send(socket: zmq.Socket[bytes], event: Event) -> None:
    # Without a high-water mark, sending blocks only without a peer; the event is then not needed.
    with contextlib.suppress(zmq.Again):
        socket.send(event_encoder.encode(event), zmq.NOBLOCK)
