"""The program of an engine process: `python -m neso.engine.ipc.engine_process ADDRESS CONFIG_JSON`.

Standard input is a pipe whose other end the server holds: when it closes, the server is gone, and so is this.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import msgspec
import zmq

from neso.engine.config import EngineConfig
from neso.engine.diagnostics.watchdog import HANG_STATUS, StepWatchdog
from neso.engine.ipc.engine_loop import run_engine
from neso.engine.load.loader import load_engine


def main(address: str, config_json: str) -> None:
    """Connect to the server and serve one model to it."""
    # Ctrl-C reaches the whole process group; the server decides when its engines end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True, name="parent-watch").start()
    config = msgspec.json.decode(config_json, type=EngineConfig)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    # What hangs cannot be told to stop: the server sees the process end, and fails its requests.
    run_engine(
        socket,
        lambda: load_engine(config),
        lambda core: StepWatchdog(core, config, on_hang=lambda: os._exit(HANG_STATUS)),
    )
    context.term()


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
