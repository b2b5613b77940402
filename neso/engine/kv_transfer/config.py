"""Options of KV transfers between engines."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Via = Literal["auto", "shm", "nixl", "messages"]
"""How blocks are read: shared memory of one host, NIXL, or the content in messages."""


class KvTransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and where engines read blocks of this engine's KV cache, and how this engine reads those of others."""

    kv_transfer: Annotated[bool, Meta(description="Let engines take computed prompts from each other.")] = (
        False
    )
    kv_transfer_host: Annotated[
        str | None,
        Meta(description="Name or address of this host that engines on other hosts connect to."),
    ] = None
    kv_transfer_via: Annotated[
        Via,
        Meta(
            description="How blocks are read: auto (the first that both sides have), shm, nixl or messages."
        ),
    ] = "auto"
