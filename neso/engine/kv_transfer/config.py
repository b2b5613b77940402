"""Options of KV transfers between engines."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class KvTransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and where engines read blocks of this engine's KV cache."""

    kv_transfer: Annotated[bool, Meta(description="Let engines take computed prompts from each other.")] = (
        False
    )
    kv_transfer_host: Annotated[
        str | None,
        Meta(description="Name or address of this host that engines on other hosts connect to."),
    ] = None
    kv_transfer_shared_memory: Annotated[
        bool, Meta(description="Copy blocks through shared memory between engines on one host.")
    ] = True
