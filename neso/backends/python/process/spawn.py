"""Start the process of a model."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

from neso.backends.python.process.arena import make_file
from neso.backends.python.process.environment import Interpreter

_PROGRAM = Path(__file__).with_name("bootstrap.py")


class Spawned:
    """A process, the socket to it, and the files of the shared memory; the descriptors are this object's."""

    def __init__(self, interpreter: Interpreter, memory_name: str) -> None:
        self.from_server, self.to_server = make_file(memory_name), make_file(memory_name)
        self.socket, theirs = socket.socketpair()
        passed = (theirs.fileno(), self.from_server.fileno(), self.to_server.fileno())
        try:
            self.process = subprocess.Popen(
                [interpreter.program, str(_PROGRAM), *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                env=interpreter.variables,
            )
        except OSError:
            self.close()
            raise
        finally:
            theirs.close()

    def close(self) -> None:
        """Close the descriptors; memory that somebody looks at stays."""
        self.socket.close()
        self.from_server.close()
        self.to_server.close()


def how_it_ended(code: int) -> str:
    """A status as `Popen` gives it, in words."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
