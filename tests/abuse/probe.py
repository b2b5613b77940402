"""Requests `GET /v2/health/live` every 20 ms until standard input ends, then prints the result as JSON.

    python probe.py PORT PID

It is a process of its own, because an attack keeps the interpreter of the test process busy. It needs only the standard
library, so that it starts quickly. Its times do not include what other processes of the machine cost the server: the
kernel counts how long each thread of the server, and that of the probe, waited for a core (`schedstat`).
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time

INTERVAL = 0.02  # seconds between two probes
TIMEOUT = 60.0
REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"

ThreadTimes = dict[str, tuple[int, int]]
"""CPU time and time in a run queue of each thread, in nanoseconds."""


def thread_times(pid: int) -> ThreadTimes:
    """Return the times of the threads of a process; empty if the kernel does not count them."""
    times = {}
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                running, queued, _ = file.read().split()
            times[thread] = (int(running), int(queued))
    except (OSError, ValueError):
        pass  # a thread has ended
    return times


def held_time(seconds: float, before: ThreadTimes, after: ThreadTimes, own_wait: int) -> float:
    """Return the part of a probe of `seconds` that a machine without other work would need too.

    The longest wait of a thread of the server for a core is subtracted, and that of the probe, `own_wait`. The result
    is at least the CPU time of the busiest thread.
    """
    busy, queued = 0, 0
    for thread, times in after.items():
        earlier = before.get(thread, (0, 0))
        busy = max(busy, times[0] - earlier[0])
        queued = max(queued, times[1] - earlier[1])
    return min(seconds, max(busy * 1e-9, seconds - (queued + own_wait) * 1e-9))


def own_wait() -> int:
    """Return how long this process has waited for a core, in nanoseconds."""
    return sum(queued for _, queued in thread_times(os.getpid()).values())


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


def main() -> None:
    port, pid = map(int, sys.argv[1:])
    connection: socket.socket | None = None
    longest = held = 0.0
    probes = failed = 0
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], INTERVAL)[0]:
        probes += 1
        before, waited = thread_times(pid), own_wait()
        started = time.monotonic()
        try:
            if connection is None:
                connection = socket.create_connection(("127.0.0.1", port), TIMEOUT)
            good = probe(connection)
        except OSError:
            good = False
        seconds = time.monotonic() - started
        if not good:
            failed += 1
            connection = None
        if seconds > held:
            held = max(held, held_time(seconds, before, thread_times(pid), own_wait() - waited))
        longest = max(longest, seconds)
    print(json.dumps({"longest": longest, "held": held, "probes": probes, "failed": failed}))


if __name__ == "__main__":
    main()
