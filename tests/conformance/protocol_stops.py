"""Stops real processes of a cluster at exact steps of the protocol.

Python imports this module when a process starts (`stopping_environment`). It wraps the functions that do the steps: a
process that reaches a step for which the test waits claims it and holds, until the test lets it go on or kills it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eventually import wait_until

_SITECUSTOMIZE = """
import sys
from pathlib import Path

if any(part.startswith("neso") for part in sys.orig_argv):
    import protocol_stops

    protocol_stops.install(Path({folder!r}))
"""


def stopping_environment(folder: Path) -> dict[str, str]:
    """Return environment variables for processes that stop where a `Stops` of the same folder wants it."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(folder=str(folder)))
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


class Stops:
    """The test's side. A step is reached by one process, the first one after `wanted`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def want(self, step: str) -> None:
        """Let the next process that reaches a step hold there."""
        for name in (f"{step}.reached", f"{step}.go"):
            (self._folder / name).unlink(missing_ok=True)
        (self._folder / step).touch()

    def is_reached(self, step: str) -> bool:
        return (self._folder / f"{step}.reached").exists()

    def reached(self, step: str) -> int:
        """Wait until a process holds at a step; returns its id."""
        path = self._folder / f"{step}.reached"
        wait_until(lambda: path.exists() and path.read_text(), 120)
        return int(path.read_text())

    def go_on(self, step: str) -> None:
        """Let the process continue, and no other one stop."""
        (self._folder / step).unlink(missing_ok=True)
        (self._folder / f"{step}.go").touch()


def install(folder: Path) -> None:
    """Wrap the steps in this process."""
    from neso.cluster.front_end import ClusterChannel
    from neso.cluster.jetstream.ticket_pulls import TicketPulls
    from neso.cluster.jetstream.worker import NatsServers
    from neso.cluster.worker import Worker
    from neso.engine.kv_transfer.addon import KvTransfer
    from neso.engine.kv_transfer.exports import ExportTable
    from neso.engine.kv_transfer.fetch import Fetcher

    def reach(step: str) -> None:
        try:
            (folder / step).rename(folder / f"{step}.claimed")  # one process only
        except FileNotFoundError:
            return
        (folder / f"{step}.claimed").write_text(str(os.getpid()))
        (folder / f"{step}.claimed").rename(folder / f"{step}.reached")
        while not (folder / f"{step}.go").exists():
            time.sleep(0.002)

    def frames(worker: Any, frames: Any = None, **_: Any) -> str:
        outputs = [frame for list_ in (frames or {}).values() for frame in list_ if frame.output.token_ids]
        if "decode" not in worker.roles:
            return ""
        if any(frame.output.finish_reason is not None for frame in outputs):
            return "last-token"
        return "token" if any(frame.start >= 5 for frame in outputs) else ""

    def grant(worker: Any, *_: Any) -> str:
        return f"grant-{'decode' if 'decode' in worker.roles else 'prefill'}"

    # In the server.
    _before(ClusterChannel, "_dispatch", reach, lambda self: "put" if self.queue.num_waiting else "")
    _after(ClusterChannel, "_grant", reach, lambda *_: "granted")
    _before(ClusterChannel, "_end", reach, lambda self, job, *_: "" if job.delivered.open else "acknowledge")
    _before(
        TicketPulls, "_acknowledge", reach, lambda self, ack, text: "ticket-ack" if text == b"+ACK" else ""
    )
    # In a worker.
    _before(Worker, "_start", reach, grant)
    _before(Worker, "_report", reach, frames)
    _before(NatsServers, "_claim", reach, lambda *_: "claim")
    # In an engine.
    _after(
        ExportTable, "publish", reach, lambda self, export, blocks, epochs: "chunk" if len(blocks) > 3 else ""
    )
    _after(KvTransfer, "_complete", reach, lambda *_: "prefilled")
    _before(KvTransfer, "_begin", reach, lambda *_: "pull")
    _after(Fetcher, "_copy", reach, lambda *_: "copied")
    _after(KvTransfer, "_end", reach, lambda *_: "imported")


def _before(kind: type, name: str, reach: Callable[[str], None], step: Callable[..., str]) -> None:
    original = getattr(kind, name)

    def stopping(*arguments: Any, **options: Any) -> Any:
        reach(step(*arguments, **options) or "none")
        return original(*arguments, **options)

    setattr(kind, name, stopping)


def _after(kind: type, name: str, reach: Callable[[str], None], step: Callable[..., str]) -> None:
    original = getattr(kind, name)

    def stopping(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        reach(step(*arguments, **options) or "none")
        return result

    setattr(kind, name, stopping)
