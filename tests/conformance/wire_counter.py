"""A proxy that counts the bytes that a server sends, to check gRPC compression on the wire."""

from __future__ import annotations

import socket
import threading


class WireCounter:
    """Forwards connections on `port` of localhost to `target`; `received` is the number of bytes it returned."""

    def __init__(self, target: int) -> None:
        self.sent = 0
        self.received = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> WireCounter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes up accept()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # it has ended, and the client has not noticed yet
                client.close()
                continue
            for source, sink, name in ((client, server, "sent"), (server, client, "received")):
                threading.Thread(target=self._copy, args=(source, sink, name), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        try:
            while data := source.recv(1 << 16):
                setattr(self, name, getattr(self, name) + len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return
