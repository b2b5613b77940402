"""Authentication of ranks and their supervisor on the control channel.

A Unix socket in a directory of this user needs none. Over TCP all processes of a job have the same secret, and each
side proves that it knows the secret without sending it. Later messages are neither encrypted nor signed.

    rank        supervisor
    Hello    ->
             <- Challenge     proves that the supervisor knows the secret
    Answer   ->               proves that the rank knows it
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from neso.engine.errors import EngineError
from neso.engine.parallel.control import (
    MAX_MESSAGE,
    Answer,
    Challenge,
    FromRank,
    Hello,
    RankConnection,
    SupervisorConnection,
)

SECRET_VARIABLE = "NESO_RANK_SECRET"
"""Environment variable with the secret; unlike arguments, other users cannot read it."""
MIN_SECRET = 16
"""Minimum length of the secret in characters."""
HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a connection has to prove that it is from a rank."""
_ANSWER_TIMEOUT = 60.0
"""Seconds that a rank waits for the supervisor's proof."""


class HandshakeError(Exception):
    """The other side is not a process of this job."""


def rank_secret(address: str, environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the secret of the ranks that connect to `address`; empty for a Unix socket.

    Raises `EngineError` if there is none, or if it is too short.
    """
    if Path(address).is_absolute():
        return b""
    secret = environment.get(SECRET_VARIABLE, "")
    if len(secret) >= MIN_SECRET:
        return secret.encode()
    found = f"has only {len(secret)} characters" if secret else "is not set"
    raise EngineError(
        f"ranks that connect to {address} need a secret, but {SECRET_VARIABLE} {found}. Set this environment variable "
        f"to the same random text of at least {MIN_SECRET} characters for all ranks, for example by "
        f"`export {SECRET_VARIABLE}=$(openssl rand -hex 16)`; mpirun of Open MPI passes it on with "
        f"`-x {SECRET_VARIABLE}`"
    )


def new_nonce() -> bytes:
    """Return random bytes for one handshake."""
    return secrets.token_bytes(32)


def introduce(connection: RankConnection, hello: Hello, secret: bytes) -> None:
    """The rank's side of the handshake. Raises `HandshakeError`, `OSError`, `msgspec.MsgspecError`."""
    connection.socket.settimeout(_ANSWER_TIMEOUT)
    connection.tell(hello)
    challenge = connection.next()
    if not isinstance(challenge, Challenge) or not hmac.compare_digest(
        challenge.proof, _prove(secret, "supervisor", hello.nonce, challenge.nonce)
    ):
        raise HandshakeError(f"the process that listens there does not have this rank's {SECRET_VARIABLE}")
    connection.tell(Answer(_prove(secret, "rank", hello.nonce, challenge.nonce)))
    connection.socket.settimeout(None)


class RankHandshake:
    """The supervisor's side of the handshake on one connection."""

    def __init__(self, connection: SupervisorConnection, secret: bytes) -> None:
        self.connection = connection
        self._secret, self._nonce = secret, new_nonce()
        self._hello: Hello | None = None
        self._deadline = time.monotonic() + HANDSHAKE_TIMEOUT

    @property
    def is_late(self) -> bool:
        """Whether the handshake took longer than `HANDSHAKE_TIMEOUT`."""
        return time.monotonic() > self._deadline

    def advance(self, message: FromRank) -> Hello | None:
        """Answer a message. Returns the rank's `Hello` when it has proven that it knows the secret.

        Raises `HandshakeError`, `OSError`.
        """
        hello = self._hello
        if hello is None and isinstance(message, Hello):
            proof = _prove(self._secret, "supervisor", message.nonce, self._nonce)
            self.connection.tell(Challenge(self._nonce, proof))
            self._hello = message
            return None
        if hello is None or not isinstance(message, Answer):
            raise HandshakeError("not from a rank")
        if not hmac.compare_digest(message.proof, _prove(self._secret, "rank", hello.nonce, self._nonce)):
            raise HandshakeError(f"it does not have the {SECRET_VARIABLE} of this server")
        self.connection.limit = MAX_MESSAGE
        return hello


def _prove(
    secret: bytes, side: Literal["rank", "supervisor"], rank_nonce: bytes, supervisor_nonce: bytes
) -> bytes:
    """Return the proof of one side that it knows the secret."""
    return hmac.digest(secret, side.encode() + rank_nonce + supervisor_nonce, "sha256")
