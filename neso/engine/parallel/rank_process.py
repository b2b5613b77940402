"""Rank process: `python -m neso.engine.parallel.rank_process ADDRESS` runs one rank of a model.

Started by mpiexec, mpirun or srun, from whose environment it takes its rank. ADDRESS is that of the supervisor's
control channel: a path, or HOST:PORT. Rank 0 runs the engine; the others execute its steps.
"""

from __future__ import annotations

import os
import signal
import sys

import zmq
from msgspec import MsgspecError

from neso.engine.diagnostics.watchdog import StepWatchdog
from neso.engine.errors import EngineError
from neso.engine.ipc.engine_process import run_engine, with_load_log
from neso.engine.load.loader import load_engine, load_rank
from neso.engine.parallel.handshake import HandshakeError
from neso.engine.parallel.launched_rank import launched_rank
from neso.engine.parallel.launcher import die_with_parent
from neso.engine.parallel.session import RankSession


def main(address: str) -> int:
    """Run the rank until the model is unloaded; returns the exit status."""
    # Ctrl-C is sent to the whole process group; the supervisor decides when its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    launched = launched_rank()
    if launched is None:
        print(
            "neso: this process was not started by a launcher of ranks (mpirun, srun, torchrun)",
            file=sys.stderr,
        )
        return 2
    try:
        session = RankSession(address, launched.rank, launched.size)
    except (OSError, HandshakeError, MsgspecError) as error:
        print(f"neso: rank {launched.rank} cannot connect to {address}: {error}", file=sys.stderr)
        return 1
    except EngineError as error:
        print(f"neso: rank {launched.rank}: {error}", file=sys.stderr)
        return 1
    try:
        if session.rank == 0:
            _run_engine(session)
        else:
            session.join(load_rank(session.config, session))
        session.close()
    except BaseException as error:
        session.fail(error)
    return 0


def _run_engine(session: RankSession) -> None:
    """Serve the engine's client until it shuts the engine down."""
    context = zmq.Context()
    engine_socket = context.socket(zmq.PAIR)
    engine_socket.set_hwm(0)
    engine_socket.connect(session.engine_address)
    hang = TimeoutError(f"a step took more than {session.config.step_timeout:g} s (step_timeout)")
    run_engine(
        engine_socket,
        lambda: with_load_log(lambda: load_engine(session.config, ranks=session)),
        lambda core: StepWatchdog(core, session.config, on_hang=lambda: session.fail(hang)),
    )
    context.term()


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may still wait for a message of the supervisor.
    os._exit(status)
