"""Engines on the fake runner that transfer blocks to each other."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from eventually import wait_until
from fake_engine import make_core, make_request

from neso.engine.core.request import EngineRequest, KvExport, KvImport, SequenceOutput
from neso.engine.core.stats import KvTransferStats
from neso.engine.kv_transfer.addon import KvTransfer
from neso.engine.kv_transfer.config import Via
from neso.engine.kv_transfer.format import KvFormat

BLOCK = 4

needs_nixl = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="NIXL is not installed")


class TransferEngine:
    """An engine core with KV transfers, stepped manually; every step is followed by a check of the accounting."""

    def __init__(
        self,
        *,
        model: str = "fake",
        dtype: str = "int64",
        host: str | None = None,
        via: Via = "auto",
        **options: Any,
    ) -> None:
        self.core = make_core(shares_cache=True, **{"block_size": BLOCK, **options})
        transfer = self.core.addon(KvTransfer)
        assert transfer is not None
        self.transfer = transfer
        block_size = self.core.scheduler.kv.block_size
        layout = KvFormat(
            model=model,
            layout="fake",
            dtype=dtype,
            block_size=block_size,
            num_parts=1,
            part_bytes=8 * block_size,
        )
        self.address = transfer.enable(self.core.scheduler.kv, self.core.runner, layout, host, via)
        self.outputs: dict[str, list[SequenceOutput]] = {}

    def add(self, request: EngineRequest) -> None:
        self._take(self.core.add(request))

    def export(self, prompt: list[int], transfer_id: str = "t", lease: float = 600.0, **options: Any) -> None:
        request = make_request(f"export {transfer_id}", prompt, **options)
        self.add(request.prefill_only(KvExport(transfer_id, lease)))

    def complete_export(
        self, prompt: list[int], transfer_id: str = "t", lease: float = 600.0, **options: Any
    ) -> SequenceOutput:
        """Export a prompt and return the output that ends the request."""
        self.export(prompt, transfer_id, lease, **options)
        return self.run_until_finished(f"export {transfer_id}")[-1]

    def import_from(
        self,
        other: TransferEngine | str,
        prompt: list[int],
        transfer_id: str = "t",
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        address = other if isinstance(other, str) else other.address
        source = KvImport(address, transfer_id, timeout)
        self.add(make_request(f"import {transfer_id}", prompt, kv_import=source, **options))

    def step(self) -> None:
        self._take(self.core.step())
        self.core.check_integrity()

    def run_until_finished(self, name: str) -> list[SequenceOutput]:
        """Step until a request has ended; return its outputs."""

        def ended() -> bool:
            if not self.is_finished(name):
                self.step()
            return self.is_finished(name)

        wait_until(ended)
        return self.outputs[name]

    def is_finished(self, name: str) -> bool:
        return bool(self.outputs.get(name)) and self.outputs[name][-1].finish_reason is not None

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    @property
    def stats(self) -> KvTransferStats:
        return self.core.stats().kv_transfer

    @property
    def num_used(self) -> int:
        return self.core.scheduler.kv.pool.num_used

    def wait_until_empty(self) -> None:
        """Step until no block is in use, as after the end of all requests and leases."""

        def empty() -> bool:
            self.step()
            return self.num_used == 0

        wait_until(empty)
        assert not self.core.has_work
        assert self.stats.leases == self.stats.active_imports == 0

    def _take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
