"""Requests `GET /v2/health/live` every 20 ms until standard input ends, then prints the result as JSON.

    python probe.py PORT PID

The time that threads of the server (process PID) and this process waited for a core is subtracted: other work on the
machine must not look like an attack that blocks the server.

It is a process of its own, because an attack keeps the interpreter of the test process busy. It needs only the standard
library, so that it starts quickly.
"""

from __future__ import annotations

import glob
import json
import select
import socket
import sys
import time

INTERVAL = 0.02  # seconds between two probes
TIMEOUT = 60.0
REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def probe(connection: socket.socket) -> bool:
    """Send a request; return whether the response has status 200."""
    connection.sendall(REQUEST)
    received = b""
    while b"\r\n\r\n" not in received:
        data = connection.recv(4096)
        if not data:
            return False
        received += data
    return received.startswith(b"HTTP/1.1 200 ")


def waits(pid: str) -> dict[str, float]:
    """Return the seconds that each thread of a process has waited for a core; empty if the kernel does not count."""
    found = {}
    for path in glob.iglob(f"/proc/{pid}/task/*/schedstat"):
        try:
            with open(path) as file:
                found[path] = int(file.read().split()[1]) / 1e9
        except (OSError, IndexError):  # the thread has ended
            continue
    return found


def waited(before: dict[str, float], after: dict[str, float]) -> float:
    return sum(seconds - before.get(path, 0.0) for path, seconds in after.items())


def main() -> None:
    port, pid = int(sys.argv[1]), sys.argv[2]
    connection: socket.socket | None = None
    longest = 0.0
    probes = failed = 0
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], INTERVAL)[0]:
        probes += 1
        before = waits(pid), waits("self")
        started = time.monotonic()
        try:
            if connection is None:
                connection = socket.create_connection(("127.0.0.1", port), TIMEOUT)
            good = probe(connection)
        except OSError:
            good = False
        if not good:
            failed += 1
            connection = None
        seconds = time.monotonic() - started
        seconds -= waited(before[0], waits(pid)) + waited(before[1], waits("self"))
        longest = max(longest, seconds)
    print(json.dumps({"longest": longest, "probes": probes, "failed": failed}))


if __name__ == "__main__":
    main()
