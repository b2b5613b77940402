"""KV transfer as an add-on of the engine core: exports of prompts, and imports into the prefix cache.

An import extends the prefix cache: its blocks are registered there, and the request then starts as any request with a
prefix hit. Whatever goes wrong, the request computes the missing part of its prompt itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from neso.engine.core.addon import Addon, Failures, RequestError
from neso.engine.core.kv_manager import BlockHold, KVCacheManager
from neso.engine.core.prefix_cache import CachedBlock
from neso.engine.core.request import KvExport, KvImport, KvImported, SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.core.stats import FallbackReason, KvTransferStats
from neso.engine.core.step import Step
from neso.engine.kv_transfer.config import Via
from neso.engine.kv_transfer.exports import Export, ExportTable
from neso.engine.kv_transfer.fetch import Fetch, Fetcher, Prefix
from neso.engine.kv_transfer.format import KvFormat, prefix_digest
from neso.engine.kv_transfer.nixl import open_nixl
from neso.engine.kv_transfer.server import KvServer
from neso.engine.runners.base import Logits, Runner
from neso.generation.output import FinishReason

logger = logging.getLogger(__name__)

DISABLED = "this engine transfers no KV-cache blocks (kv_transfer)"
MAX_IMPORTS = 64
"""Number of transfers at a time; further requests wait."""


@dataclass(slots=True, eq=False)
class _Import:
    """State of an importing sequence. `fetch`, `hold`: set when the transfer has begun.

    `found`: cached blocks before the first block of the transfer, held by `hold` like its targets.
    """

    sequence: Sequence
    source: KvImport
    deadline: float
    fetch: Fetch | None = None
    hold: BlockHold | None = None
    found: list[CachedBlock] | None = None
    ready: bool = False
    started_ns: int = field(default_factory=time.monotonic_ns)


class KvTransfer(Addon):
    """State of a sequence: an `Export` or an `_Import`. Without `enable`, requests for transfers are rejected."""

    def __init__(self) -> None:
        self._kv: KVCacheManager | None = None
        self._imports: list[_Import] = []
        self._ending: list[tuple[Fetch, BlockHold]] = []
        """Transfers whose requests go on without them, while their targets may still be written."""
        self._num_fetching = 0
        self._stats = KvTransferStats()
        self._exports = ExportTable()
        self._wake: Callable[[], None] = lambda: None
        self._fetched = threading.Event()
        self._server: KvServer | None = None

    def enable(
        self,
        kv: KVCacheManager,
        runner: Runner,
        block_format: KvFormat,
        host: str | None = None,
        via: Via = "auto",
    ) -> str:
        """Start the KV server of the runner's shared cache, and return its address.

        Raises `OSError` if it cannot listen at `host`, `NixlError` if `via` is "nixl" and this is not possible.
        """
        cache = runner.shared_cache
        assert cache is not None
        self._kv, self._runner = kv, runner
        self._exports = ExportTable(lambda: server.notify())
        nixl = open_nixl(cache, via, wanted=host is not None)
        self._server = server = KvServer(
            cache, block_format, self._exports, host, None if nixl is None else nixl.memory
        )
        self._server.set_wake(self._wake)
        self._fetcher = Fetcher(cache, block_format, via, nixl)
        self._threads = ThreadPoolExecutor(MAX_IMPORTS, thread_name_prefix="kv-fetch")
        return server.address

    def set_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self._server is not None:
            self._server.set_wake(wake)

    def close(self) -> None:
        if self._server is None:
            return
        for one in self._imports:
            if one.fetch is not None:
                one.fetch.cancelled = True
        self._server.close()
        self._fetcher.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._fetcher.close()
        self._server = None

    # -- life of a sequence -------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.kv_export is not None:
            self._admit_export(sequence, request.kv_export)
        elif request.kv_import is not None:
            if self._kv is None:
                raise RequestError(DISABLED, "kv_import")
            if sequence.needs_every_position:
                self._release_remote(request.kv_import)
            else:
                deadline = time.monotonic() + request.kv_import.timeout_seconds
                sequence.addons[self] = one = _Import(sequence, request.kv_import, deadline)
                self._imports.append(one)

    def _admit_export(self, sequence: Sequence, wanted: KvExport) -> None:
        if self._kv is None:
            raise RequestError(DISABLED, "kv_export")
        if sequence.needs_every_position or not sequence.uses_sampler or sequence.forks_pending:
            raise RequestError("only a request made by `prefill_only` can be exported", "kv_export")
        # The importing engine computes at least the last token.
        size = self._kv.block_size
        num_tokens = (sequence.num_tokens - 1) // size * size
        if num_tokens // size > self._kv.pool.num_blocks:
            raise RequestError(
                f"{num_tokens} tokens exceed the KV cache, so they cannot be exported", "kv_export"
            )
        try:
            export = self._exports.begin(wanted.transfer_id)
        except ValueError as error:
            raise RequestError(str(error), "kv_export") from None
        export.num_tokens = num_tokens
        if num_tokens:
            sequence.token_ids = sequence.token_ids[:num_tokens]
        sequence.max_tokens = sequence.num_tokens + 1
        sequence.uses_sampler = False
        sequence.sync_only = True
        sequence.keeps_window = True
        sequence.addons[self] = export

    def release(self, sequence: Sequence) -> None:
        state = sequence.addons.get(self)
        if isinstance(state, Export) and state.hold is None:
            self._exports.end(state, "was aborted")
        elif isinstance(state, _Import) and state.fetch is not None:
            # The blocks stay reserved until the transfer has ended.
            state.fetch.cancelled = True

    # -- exports ------------------------------------------------------------------------------------------------

    def update(self, step: Step, logits: Logits, scheduler: Scheduler) -> list[SequenceOutput]:
        """Publish the blocks that the step has filled, and begin the lease after the last one."""
        outputs = []
        for scheduled in step.users[self]:
            sequence, export = scheduled.sequence, scheduled.sequence.addons[self]
            if not isinstance(export, Export) or sequence.released:
                continue
            num_full = min(sequence.num_computed_tokens, export.num_tokens) // scheduler.kv.block_size
            blocks = sequence.block_table[:num_full].tolist()
            if blocks and not export.digest:
                export.digest = prefix_digest(_identity(sequence), sequence.cache_tokens[: export.num_tokens])
            epochs = scheduler.kv.pool.epochs
            assert epochs is not None
            self._runner.store_shared(blocks[len(export.blocks) :])
            self._exports.publish(export, blocks, epochs[blocks].tolist())
            if sequence.num_uncomputed_tokens == 0:
                outputs.append(self._complete(sequence, export, blocks, scheduler))
        return outputs

    def _complete(
        self, sequence: Sequence, export: Export, blocks: list[int], scheduler: Scheduler
    ) -> SequenceOutput:
        wanted = sequence.request.kv_export
        assert wanted is not None
        self._exports.complete(export, scheduler.kv.hold(blocks), wanted.lease_seconds)
        self._stats.exports += 1
        self._stats.exported_blocks += len(blocks)
        output = SequenceOutput(
            request_id=sequence.request.request_id,
            index=0,
            token_ids=[],
            finish_reason=FinishReason.LENGTH,
            cached_tokens=sequence.num_cached_tokens,
            scheduled_ns=sequence.scheduled_ns,
            preemptions=sequence.num_preemptions,
            exported_tokens=export.num_tokens,
        )
        scheduler.release(sequence)
        return output

    def stop(self, sequence: Sequence) -> None:
        """Forget the blocks of a preempted export; a reader notices by their epochs if they are overwritten."""
        state = sequence.addons.get(self)
        if isinstance(state, Export) and state.hold is None:
            self._exports.publish(state, [], [])

    def extend_lease(self, transfer_id: str, seconds: float) -> None:
        """Keep the blocks of an export for `seconds` from now on; ignored if the lease has ended."""
        self._exports.extend(transfer_id, seconds)

    def release_lease(self, transfer_id: str) -> None:
        """Free the blocks of an export; ignored if the lease has ended."""
        self._exports.release(transfer_id)

    # -- imports ------------------------------------------------------------------------------------------------

    def can_start(self, sequence: Sequence) -> bool:
        state = sequence.addons.get(self)
        return not isinstance(state, _Import) or state.ready

    def begin_step(self, scheduler: Scheduler) -> Failures:
        for export in self._exports.take_ended():
            assert export.hold is not None
            scheduler.kv.drop(export.hold)
        if self._ending:
            self._drop_ended(scheduler.kv)
        if self._imports:
            self._imports = [one for one in self._imports if not self._advance(one, scheduler)]
        return []

    def _advance(self, one: _Import, scheduler: Scheduler) -> bool:
        """Begin or end a transfer; returns whether it has ended."""
        if one.fetch is None:
            if one.sequence.released:
                return True
            self._begin(one, scheduler)
        elif one.fetch.done.is_set():
            self._end(one, one.fetch, scheduler.kv)
        return one.ready

    def _begin(self, one: _Import, scheduler: Scheduler) -> None:
        """Reserve the blocks and begin a transfer; without free blocks, try again in the next step."""
        sequence, kv = one.sequence, scheduler.kv
        if sequence.adapter_digest() is None or self._num_fetching >= MAX_IMPORTS:
            self._fall_back_in_time(one)
            return
        size = kv.block_size
        tokens = list(sequence.cache_tokens)
        found = kv.prefix_cache.match(sequence.cache_identity, tokens)
        missing = (len(tokens) - 1) // size - len(found)
        if not missing:
            self._release_remote(one.source)
            one.ready = True
            return
        held = kv.hold([cached.block for cached in found if cached.block is not None])
        reserved = scheduler.reserve(missing)
        if reserved is None:
            kv.drop(held)
            self._fall_back_in_time(one)
            return
        one.found, one.hold = found, kv.merge(held, reserved)
        one.fetch = Fetch(
            address=one.source.address,
            transfer_id=one.source.transfer_id,
            prefix=Prefix(_identity(sequence), tokens),
            first=len(found),
            targets=reserved.blocks,
            deadline=one.deadline,
        )
        self._num_fetching += 1
        self._threads.submit(self._fetch, one.fetch)

    def _release_remote(self, source: KvImport) -> None:
        self._threads.submit(self._fetcher.release, source.address, source.transfer_id)

    def _fetch(self, fetch: Fetch) -> None:
        self._fetcher.run(fetch)
        self._fetched.set()
        self._wake()

    def _end(self, one: _Import, fetch: Fetch, kv: KVCacheManager) -> None:
        assert one.hold is not None and one.found is not None
        sequence, size = one.sequence, kv.block_size
        parent = one.found[-1].node if one.found else sequence.cache_identity
        end = fetch.first + fetch.num_blocks
        self._runner.load_shared(fetch.targets[: fetch.num_blocks])
        kv.register_blocks(
            parent, fetch.prefix.tokens[fetch.first * size : end * size], fetch.targets[: fetch.num_blocks]
        )
        self._ending.append((fetch, one.hold))
        self._drop_ended(kv)
        self._stats.imported_blocks += fetch.num_blocks
        self._stats.imported_bytes += fetch.num_bytes
        self._stats.import_seconds += fetch.seconds
        sequence.num_imported_tokens = fetch.num_blocks * size
        missing = len(fetch.targets) - fetch.num_blocks
        sequence.imported = KvImported(
            one.started_ns, time.monotonic_ns(), fetch.num_blocks, missing, fetch.num_bytes, fetch.transport
        )
        if fetch.error and not sequence.released:
            self._fall_back(one, fetch.error, fetch.reason)
        else:
            self._stats.imports += not fetch.error
        one.ready = True

    def _drop_ended(self, kv: KVCacheManager) -> None:
        still_ending = []
        for fetch, hold in self._ending:
            if fetch.ended.is_set():
                kv.drop(hold)
                self._num_fetching -= 1
            else:
                still_ending.append((fetch, hold))
        self._ending = still_ending

    def _fall_back_in_time(self, one: _Import) -> None:
        if time.monotonic() >= one.deadline:
            self._fall_back(
                one,
                "the transfer could not begin in time: no free blocks, or too many transfers",
                "no_blocks",
            )

    def _fall_back(self, one: _Import, error: str, reason: FallbackReason) -> None:
        """Let the request compute what is missing."""
        logger.warning(
            "KV transfer '%s' failed, the prompt is computed here: %s", one.source.transfer_id, error
        )
        fallbacks = self._stats.fallbacks_by_reason
        fallbacks[reason] = fallbacks.get(reason, 0) + 1
        one.sequence.import_error = error
        one.ready = True

    def start(self, sequence: Sequence) -> None:
        """Correct the number of imported tokens, some of which may have been evicted while the sequence waited."""
        state = sequence.addons.get(self)
        if isinstance(state, _Import) and state.fetch is not None and not sequence.num_preemptions:
            assert self._kv is not None
            left = sequence.num_computed_tokens - state.fetch.first * self._kv.block_size
            sequence.num_imported_tokens = max(0, min(sequence.num_imported_tokens, left))

    # -- background work ----------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return (
            bool(self._imports)
            or self._exports.has_ended()
            or any(fetch.ended.is_set() for fetch, _ in self._ending)
        )

    def wait(self, timeout: float) -> None:
        """Wait for the end of a transfer, at most `timeout` seconds."""
        if self._imports:
            self._fetched.wait(timeout)
            self._fetched.clear()
        elif len(self._exports) or self._ending:
            time.sleep(timeout)  # a waiting sequence needs the blocks of a lease, or of a transfer

    def stats(self) -> dict[str, Any]:
        if self._kv is None:
            return {}
        self._stats.leases = len(self._exports)
        self._stats.expired_leases = self._exports.num_expired
        self._stats.active_imports = len(self._imports)
        return {"kv_transfer": self._stats.copy()}


def _identity(sequence: Sequence) -> tuple[str, ...]:
    """Return what the content of a sequence's blocks depends on beside its tokens, in the same form in all engines."""
    return (*sequence.request.cache_identity, sequence.adapter_digest() or "")
