"""Options of a worker, read by its process and made by the server or by `neso worker`."""

from __future__ import annotations

import os
import socket as sockets
from pathlib import Path

import msgspec
from msgspec.structs import replace

from neso.cluster.jetstream.connection import NatsOptions
from neso.engine.cluster_config import MIXED, ClusterConfig, Roles
from neso.engine.config import EngineConfig
from neso.engine.kv_transfer.format import model_digest

_RESULT_OPTIONS = ("dtype", "quantization", "max_attention_window_size", "sink_token_length")


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a worker.

    `address`: of the front end, or a queue in NATS; `name`: unique among its workers; `drain_seconds`: to
    finish requests at the end; `verbose`: log each request.
    """

    config: EngineConfig
    address: str | NatsOptions
    name: str
    roles: Roles = MIXED
    token: str | None = None
    drain_seconds: float = 30.0
    verbose: bool = False


def worker_config(config: EngineConfig, *, transfers: bool) -> EngineConfig:
    """Return the options of a worker's engine. `transfers`: whether workers take prompts from each other.

    The server has the queue and its limit.
    """
    transfer = replace(config.transfer, kv_transfer=True) if transfers else config.transfer
    scheduler = replace(config.scheduler, max_queue_size=None)
    return replace(config, cluster=ClusterConfig(), scheduler=scheduler, transfer=transfer)


def default_name() -> str:
    """Return a name for a worker of this process."""
    return f"{sockets.gethostname().replace('.', '-')}-{os.getpid()}"


def checkpoint_digest(config: EngineConfig) -> str:
    """Return a digest of the checkpoint and of the options that change results."""
    return model_digest(Path(config.model), *(getattr(config, name) for name in _RESULT_OPTIONS))
