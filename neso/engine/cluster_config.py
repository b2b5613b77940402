"""Options of a model that is served by workers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MIN_TOKEN_LENGTH = 16
"""Minimum number of characters of the token that workers of other hosts share with the server."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of a model. The descriptions are the help texts of the options."""

    workers: Annotated[
        int,
        Meta(description="Number of worker processes to start for the model; 0 for engines without workers."),
    ] = 0
    worker_address: Annotated[
        str | None,
        Meta(description="Address for workers started by `neso worker`: tcp://HOST:PORT or ipc://PATH."),
    ] = None
    worker_token_file: Annotated[
        str | None,
        Meta(
            description="File with the secret that workers of a tcp:// address must have: at least 16 characters."
        ),
    ] = None
    max_attempts: Annotated[
        int, Meta(description="Number of workers that a request may lose before it fails.")
    ] = 3

    @property
    def enabled(self) -> bool:
        """Whether the model is served by workers."""
        return self.workers > 0 or self.worker_address is not None

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers must be at least 0, got {self.workers}")
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {self.max_attempts}")
        if self.worker_address is not None:
            check_address("worker_address", self.worker_address, self.worker_token_file)


def check_address(option: str, address: str, token_file: str | None) -> None:
    """Raise `ValueError` for an address of another kind, or a tcp:// address without a token."""
    if not address.startswith(("tcp://", "ipc://")):
        raise ValueError(f"{option} must begin with tcp:// or ipc://, got '{address}'")
    if address.startswith("tcp://") and token_file is None:
        raise ValueError(f"{option} {address} needs a file with a token: connections are encrypted with it")
