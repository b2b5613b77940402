"""KV transfers of an engine that is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.kv_transfer.addon import KvTransfer
from neso.engine.kv_transfer.format import KvFormat, model_digest
from neso.engine.kv_transfer.nixl import NixlError
from neso.engine.loop.engine_core import EngineCore
from neso.engine.runners.base import Runner


def check_transfers(config: EngineConfig, runner: Runner) -> None:
    """Check that an engine can transfer blocks. Raises `EngineError`."""
    if config.num_ranks > 1:
        raise EngineError("kv_transfer: not available with several ranks")
    if "shared_cache" not in runner.capabilities:
        raise EngineError(
            f"kv_transfer: {type(runner).__name__} does not support it; the runners native, torch and reference do"
        )
    if not config.scheduler.enable_prefix_caching:
        raise EngineError("kv_transfer needs enable_prefix_caching: transferred blocks are cached prefixes")
    if not hasattr(os, "memfd_create"):
        raise EngineError("kv_transfer needs Linux")


def start_transfers(config: EngineConfig, core: EngineCore, transfer: KvTransfer) -> tuple[str, KvFormat]:
    """Start the KV server; returns its address and the format of the blocks. Raises `EngineError`."""
    cache = core.runner.shared_cache
    assert cache is not None
    values = core.runner.cache_format
    assert values is not None
    block_format = KvFormat(
        model=model_digest(
            Path(config.model),
            config.quantization,
            config.max_attention_window_size,
            config.sink_token_length,
        ),
        block_size=config.scheduler.block_size,
        num_parts=cache.shape.num_parts,
        part_bytes=cache.shape.part_bytes,
        **values._asdict(),
    )
    options = config.transfer
    try:
        address = transfer.enable(
            core.scheduler.kv,
            core.runner,
            block_format,
            options.kv_transfer_host,
            options.kv_transfer_via,
        )
    except OSError as error:
        raise EngineError(f"kv_transfer_host: {error}") from None
    except NixlError as error:
        raise EngineError(f"kv_transfer_via: {error}") from None
    return address, block_format
