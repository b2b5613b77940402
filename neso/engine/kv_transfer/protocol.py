"""Messages between the KV servers of engines, as msgpack over ZeroMQ: each request has one reply.

An importing engine sends `Hello`, then `Pull` until the export is complete, then `Release`. The blocks themselves are
read from shared memory, with NIXL, or with `Read`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from neso.engine.kv_transfer.format import KvFormat
from neso.engine.kv_transfer.nixl import NixlMemory


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Ask for the format and the memory of the blocks; answered by `Welcome`."""

    token: str


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Ask for the blocks of an export after the first `have`; answered by `Progress` or `Ended`.

    The reply comes when there are such blocks, when the export is complete, or after a second.
    """

    token: str
    transfer_id: str
    have: int


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Ask for the content of blocks; answered by `Content` and a second frame.

    The frame is uint8[num_parts, len(blocks), part_bytes].
    """

    token: str
    blocks: list[int]


class Epochs(msgspec.Struct, frozen=True, tag="epochs"):
    """Ask for the epochs of blocks, after they were read with NIXL; answered by `Content` without a second frame."""

    token: str
    blocks: list[int]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End the lease of an export; answered by `Ended`."""

    token: str
    transfer_id: str


Query = Hello | Pull | Read | Epochs | Release


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """Where other processes of the host find a `SharedCache`: a file of a process.

    `host`: identifies the running system, `inode`: the file.
    """

    host: str
    pid: int
    fd: int
    inode: int
    num_blocks: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """`engine`: a random name; an engine that was started again has another one. `nixl`: None if it has no NIXL."""

    engine: str
    format: KvFormat
    memory: Memory
    nixl: NixlMemory | None = None


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """State of an export.

    - known: False if the engine has no such export yet; the other fields are then empty
    - complete: whether all blocks are computed
    - num_tokens: tokens of all blocks; digest: of these tokens, see `prefix_digest`; empty until the first block
    - blocks, epochs: the blocks after those that the reader has, and their epochs
    """

    known: bool = False
    complete: bool = False
    num_tokens: int = 0
    digest: bytes = b""
    blocks: list[int] = []
    epochs: list[int] = []


class Content(msgspec.Struct, frozen=True, tag="content"):
    """`epochs`: of the blocks, read after their content."""

    epochs: list[int]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """An export has ended; `reason` is for the user."""

    reason: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request is invalid."""

    reason: str


Reply = Welcome | Progress | Content | Ended | Refused

encoder = msgspec.msgpack.Encoder()
query_decoder: msgspec.msgpack.Decoder[Query] = msgspec.msgpack.Decoder(Query)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class KvAddress(NamedTuple):
    """An address of a KV server with the token that it expects: `ENDPOINT#TOKEN`."""

    endpoint: str
    token: str

    @classmethod
    def parse(cls, address: str) -> KvAddress:
        """Raises `ValueError`."""
        endpoint, separator, token = address.partition("#")
        if not separator or not endpoint.startswith(("ipc://", "tcp://")):
            raise ValueError("is not the kv_address of an engine")
        return cls(endpoint, token)

    def __str__(self) -> str:
        return f"{self.endpoint}#{self.token}"


def host_id() -> str:
    """Return an identifier of the running system: processes with the same one can share memory."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
