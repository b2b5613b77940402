"""Checks grammars in a separate process, because they may take too long, run out of memory or crash."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading

import msgspec

from neso.engine.guided.grammar import GrammarError
from neso.engine.guided.sandbox_process import read_frame, write_frame
from neso.engine.guided.token_table import TokenTable

_START_TIMEOUT = 120.0


class GrammarSandbox:
    """A process that checks grammars for one thread.

    It is started for the first grammar, and restarted after a failure.
    """

    def __init__(self, table: TokenTable, timeout: float) -> None:
        """`timeout`: seconds per grammar."""
        self._table = msgspec.msgpack.encode(table)
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process without waiting for it."""
        if self._process is None:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "neso.engine.guided.sandbox_process",
                    str(math.ceil(self._timeout) + 1),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._ready = False

    def check(self, grammar: str) -> None:
        """Check a grammar. Raises `GrammarError` if it is invalid or takes too long."""
        self.start()
        if not self._ready:
            if self._request(self._table, _START_TIMEOUT) is None:
                self.close()
                raise GrammarError("cannot be compiled: the process for it does not start")
            self._ready = True
        killed = threading.Event()
        answer = self._request(grammar.encode(), self._timeout, killed)
        if answer is None:
            self.close()
            if killed.is_set():
                raise GrammarError(f"is too complex: it was not compiled within {self._timeout:g} seconds")
            raise GrammarError("is too complex: compiling it takes too much memory or too deep a stack")
        if answer:
            raise GrammarError(answer.decode())

    def close(self) -> None:
        """Terminate the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    # Closing flushes unread input, which fails because the process has ended.
                    with contextlib.suppress(OSError):
                        pipe.close()
            process.wait()

    def _request(self, message: bytes, timeout: float, killed: threading.Event | None = None) -> bytes | None:
        """Send a message and return the reply; None if the process has ended.

        The process is killed after the timeout.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        turn, answered = threading.Lock(), False

        def kill() -> None:
            with turn:
                if answered:
                    return  # the reply has just arrived: keep the process for the next grammar
                if killed is not None:
                    killed.set()
                process.kill()

        timer = threading.Timer(timeout, kill)
        timer.daemon = True
        timer.start()
        try:
            write_frame(process.stdin, message)
            answer = read_frame(process.stdout)
        except OSError:
            return None
        finally:
            with turn:
                answered = True
            timer.cancel()
        return None if killed is not None and killed.is_set() else answer
