"""Options of a model that is served by workers."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

Roles = frozenset[str]
PREFILL: Roles = frozenset({"prefill"})
DECODE: Roles = frozenset({"decode"})
MIXED: Roles = PREFILL | DECODE
"""A worker computes prompts for others (prefill), generates text (decode), or does both."""
MIN_TOKEN_LENGTH = 16
"""Minimum number of characters of the token that workers of other hosts share with the server."""


DEFAULT_TRACKED_BLOCKS = 1_000_000


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of a model. The descriptions are the help texts of the options."""

    workers: Annotated[
        int,
        Meta(description="Number of worker processes that compute prompts and generate text."),
    ] = 0
    prefill_workers: Annotated[
        int, Meta(description="Number of worker processes that only compute prompts.")
    ] = 0
    decode_workers: Annotated[
        int,
        Meta(
            description="Number of worker processes that generate text; prefill workers compute long prompts."
        ),
    ] = 0
    min_remote_prefill: Annotated[
        int | None,
        Meta(
            description="Decode workers compute prompts with fewer uncached tokens. Default: by measured time."
        ),
    ] = None
    max_tracked_blocks: Annotated[
        int,
        Meta(description="Most blocks of a worker's cache that it reports; a larger cache is estimated."),
    ] = DEFAULT_TRACKED_BLOCKS
    max_queue_seconds: Annotated[
        float | None,
        Meta(
            description="Reject requests while the prefill of those that wait takes more seconds than this."
        ),
    ] = None
    ttft_target: Annotated[
        float | None,
        Meta(description="Target of the time to the first token; with itl_target, workers change roles."),
    ] = None
    itl_target: Annotated[
        float | None, Meta(description="Target of the seconds between two tokens; see ttft_target.")
    ] = None
    role_period: Annotated[
        float, Meta(description="Seconds between two decisions about the roles of workers.")
    ] = 5.0
    worker_address: Annotated[
        str | None,
        Meta(
            description="Address for `neso worker`: tcp://HOST:PORT, ipc://PATH, or nats://HOST:PORT (shared)."
        ),
    ] = None
    worker_token_file: Annotated[
        str | None,
        Meta(description="File with the secret for tcp:// (at least 16 characters) or the token of NATS."),
    ] = None
    nats_queue: Annotated[
        str | None,
        Meta(description="Queue in NATS of a model's servers and workers. Default: its directory's name."),
    ] = None
    nats_credentials_file: Annotated[
        str | None, Meta(description="File with the credentials of a NATS user (JWT and seed).")
    ] = None
    nats_nkey_file: Annotated[str | None, Meta(description="File with the seed of an NKEY of NATS.")] = None
    nats_password_file: Annotated[str | None, Meta(description="File with USER:PASSWORD for NATS.")] = None
    nats_ca_file: Annotated[
        str | None, Meta(description="File with the certificates that verify NATS, for tls:// addresses.")
    ] = None
    nats_cert_file: Annotated[str | None, Meta(description="File with the client certificate for NATS.")] = (
        None
    )
    nats_key_file: Annotated[str | None, Meta(description="File with the key of nats_cert_file.")] = None
    nats_max_requests: Annotated[
        int, Meta(description="Reject requests while so many of all servers wait or run in the queue.")
    ] = 10_000
    max_attempts: Annotated[
        int, Meta(description="Number of workers that a request may lose before it fails.")
    ] = 3

    @property
    def enabled(self) -> bool:
        """Whether the model is served by workers."""
        return bool(self.local_roles) or self.worker_address is not None

    @property
    def local_roles(self) -> list[Roles]:
        """The roles of each worker that the server starts."""
        return [
            *([MIXED] * self.workers),
            *([PREFILL] * self.prefill_workers),
            *([DECODE] * self.decode_workers),
        ]

    def __post_init__(self) -> None:
        for name in (
            "workers",
            "prefill_workers",
            "decode_workers",
            "min_remote_prefill",
            "max_tracked_blocks",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if self.prefill_workers and not (self.decode_workers or self.workers or self.worker_address):
            raise ValueError("prefill_workers need decode_workers, which generate the text")
        for name in ("max_queue_seconds", "ttft_target", "itl_target", "role_period"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if (self.ttft_target is None) != (self.itl_target is None):
            raise ValueError("ttft_target and itl_target must be given together")
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {self.max_attempts}")
        if self.nats_max_requests < 1:
            raise ValueError(f"nats_max_requests must be at least 1, got {self.nats_max_requests}")
        if self.nats_queue is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", self.nats_queue):
            raise ValueError(
                f"nats_queue must consist of letters, digits, '-' and '_', got '{self.nats_queue}'"
            )
        if (self.nats_cert_file is None) != (self.nats_key_file is None):
            raise ValueError("nats_cert_file and nats_key_file must be given together")
        if self.worker_address is not None:
            if not is_nats(self.worker_address):
                check_address("worker_address", self.worker_address, self.worker_token_file)
            elif self.ttft_target is not None:
                raise ValueError(
                    "ttft_target and itl_target change roles, which is not supported with workers that servers share"
                )


def is_nats(address: str) -> bool:
    """Whether an address, or a list of addresses separated by commas, is one of NATS."""
    return all(url.startswith(("nats://", "tls://")) for url in address.split(","))


def check_address(option: str, address: str, token_file: str | None) -> None:
    """Raise `ValueError` for an address of another kind, or a tcp:// address without a token."""
    if not address.startswith(("tcp://", "ipc://")):
        shown = re.sub(r"//[^/@]*@", "//", address)
        raise ValueError(f"{option} must begin with tcp:// or ipc://, got '{shown}'")
    if address.startswith("tcp://") and token_file is None:
        raise ValueError(f"{option} {address} needs a file with a token: connections are encrypted with it")
