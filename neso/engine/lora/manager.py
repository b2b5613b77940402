"""LoRA adapters as an add-on of the engine core: names and versions, loading, memory, and the runner's slots."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from neso.engine.core.addon import Addon, Failures, RequestError
from neso.engine.core.prefix_keys import AdapterVersion
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.core.step import Step
from neso.engine.lora.adapter import LoraAdapter, LoraPlan, read_tensors
from neso.engine.lora.adapter_cache import AdapterCache, CacheFull
from neso.engine.lora.adapter_slots import AdapterSlots, AdapterUse
from neso.engine.lora.config import AdapterError, LoraConfig
from neso.engine.lora.peft_checkpoint import read_peft_checkpoint
from neso.engine.runners.base import PackedAdapter, SpecRunner
from neso.generation.request import TASK_PREFIX, LoraRequest

logger = logging.getLogger(__name__)

Watch = Callable[[AdapterError | None], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A finished load; `error` is None if the version can be used."""

    version: int
    error: AdapterError | None


@dataclass(slots=True)
class _Known:
    """An adapter by name. `version`: loaded or loading; 0 if it was evicted and must be read again.

    `loaded_before`: keep the name even if reading the adapter again fails.
    """

    version: int
    path: str | None
    loaded_before: bool = False


class LoraManager(Addon):
    """Manages the adapters of an engine.

    Used only by the engine thread; files are read and packed in a background thread.

    Every load creates a new version, which is part of the cache identity of its sequences, so blocks computed with
    other weights of the same name are never reused. A replaced or unloaded version stays until its last sequence ends.
    """

    def __init__(self, config: LoraConfig, runner: SpecRunner) -> None:
        self.config = config
        self.slots = AdapterSlots(config.max_loras)
        self.revision = 0
        """Incremented when `names` changes."""
        self._runner = runner
        self._cache: AdapterCache[PackedAdapter] = AdapterCache(config.lora_cache_host_memory_bytes)
        self._versions = itertools.count(1)
        self._known: dict[str, _Known] = {}
        self._name_of: dict[int, str] = {}
        self._digests: dict[int, str] = {}
        self._loading: dict[int, Future[PackedAdapter]] = {}
        self._watchers: dict[int, list[Watch]] = {}
        self._candidates: dict[int, _Known] = {}  # by the version being loaded
        self._rejected_versions: list[int] = []  # versions whose slots must be freed
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lora-loader")

    # -- names --------------------------------------------------------------------------------------------------

    def load(self, request: LoraRequest, watch: Watch | None = None) -> int:
        """Start loading an adapter and return its version.

        The name keeps its current adapter until the new one is loaded. `watch` is called when the load ends, with the
        error or None. Raises `AdapterError` if the request has neither a path nor tensors.
        """
        version = self._version_loading(request)
        if not version:
            candidate = _Known(0, request.path)
            version = candidate.version = self._start_loading(request, candidate)
            self._known.setdefault(request.name, candidate)
        if watch is not None:
            self._watchers.setdefault(version, []).append(watch)
        return version

    def unload(self, name: str) -> bool:
        """Remove a name; requests in flight finish with its adapter. Returns False if the name is unknown."""
        for version in [v for v in self._candidates if self._name_of[v] == name]:
            del self._candidates[version]
        known = self._known.pop(name, None)
        if known is None:
            return False
        self.revision += 1
        self._drop_unless_needed(known.version)
        return True

    def names(self) -> dict[str, str | None]:
        """Return the adapters that requests can name, each with the path it was loaded from, if any."""
        return {name: known.path for name, known in self._known.items()}

    # -- sequences ----------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        wanted = sequence.request.lora
        if wanted is None:
            return
        version = self._version_for(wanted)
        sequence.addons[self] = AdapterUse(version)
        sequence.cache_identity = (*sequence.cache_identity, AdapterVersion(wanted.name, version))
        sequence.adapter_digest = partial(self._digests.get, version)
        self._cache.pin(version)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        use: AdapterUse | None = parent.addons.get(self)
        if use is not None:
            child.addons[self] = AdapterUse(use.version)
            self._cache.pin(use.version)
            self.start(child)

    def can_start(self, sequence: Sequence) -> bool:
        use: AdapterUse | None = sequence.addons.get(self)
        return use is None or self.slots.admits(use)

    def start(self, sequence: Sequence) -> None:
        if self in sequence.addons:
            self.slots.acquire(sequence.addons[self])

    def stop(self, sequence: Sequence) -> None:
        if self in sequence.addons:
            self.slots.release(sequence.addons[self])

    def release(self, sequence: Sequence) -> None:
        use: AdapterUse | None = sequence.addons.pop(self, None)
        if use is not None:
            self._cache.unpin(use.version)
            self._drop_unless_needed(use.version)

    def _version_for(self, wanted: LoraRequest) -> int:
        """Return the version of the adapter named by a request; it may still be loading.

        Raises `AdapterError` if the adapter is unknown and the request does not supply it.
        """
        known = self._known.get(wanted.name)
        if known is not None and wanted.path in (None, known.path):
            if not known.version:
                known.version = self._start_loading(LoraRequest(name=wanted.name, path=known.path), known)
            return known.version
        if wanted.path is not None or wanted.tensors is not None:
            return self.load(wanted)
        raise self._unknown(wanted.name)

    # -- steps --------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._loading)

    def wait(self, timeout: float) -> None:
        """Wait for the end of a load, at most `timeout` seconds."""
        if self._loading:
            wait(self._loading.values(), timeout=timeout, return_when="FIRST_COMPLETED")

    def begin_step(self, scheduler: Scheduler) -> Failures:
        """Finish loads. Fails the sequences whose adapter could not be loaded."""
        self.slots.begin_admission()
        for version in self._rejected_versions:
            self.slots.vacate(version)
        self._rejected_versions = []
        failures: Failures = []
        for loaded in self.take_loaded() if self._loading else ():
            if loaded.error is not None:
                failures += [
                    (s, loaded.error) for s in scheduler.waiting if self._version_of(s) == loaded.version
                ]
        return failures

    def prepare(self, step: Step, scheduler: Scheduler) -> Failures:
        """Load the adapters of the step into the runner. Fails the sequences whose adapter the runner rejects."""
        failures: Failures = []
        for version, error in self.fill_slots().items():
            self._rejected_versions.append(version)
            failure = RequestError(f"its adapter failed: {error}")
            failures += [(s, failure) for s in scheduler.running if self._version_of(s) == version]
        return failures

    def extend(self, step: Step) -> None:
        uses = [sequence.addons.get(self) for sequence in step.sequences]
        step.add_part(LoraPlan(np.array([-1 if use is None else use.slot for use in uses], np.int32)))

    def check_integrity(self, scheduler: Scheduler) -> None:
        self.slots.check_integrity(s.addons[self] for s in scheduler.running if self in s.addons)

    def _version_of(self, sequence: Sequence) -> int:
        use: AdapterUse | None = sequence.addons.get(self)
        return 0 if use is None else use.version

    def take_loaded(self) -> list[Loaded]:
        """Return the loads that ended since the last call."""
        ended = []
        for version in [version for version, future in self._loading.items() if future.done()]:
            error = self._finish(version, self._loading.pop(version))
            for watch in self._watchers.pop(version, ()):
                watch(error)
            ended.append(Loaded(version, error))
        return ended

    def fill_slots(self) -> dict[int, Exception]:
        """Load the adapters of changed slots into the runner. Returns the errors of rejected adapters by version."""
        failed: dict[int, Exception] = {}
        for slot, version in self.slots.take_changes():
            try:
                # The adapter may have been removed in the meantime.
                self._runner.set_adapter(slot, self._cache.get(version))
            except Exception as error:
                logger.exception("adapter '%s' could not be put in its slot", self._name_of.get(version, ""))
                if version:
                    failed[version] = error
        return failed

    def _version_loading(self, request: LoraRequest) -> int:
        for version, known in self._candidates.items():
            if self._name_of[version] == request.name and request.path == known.path is not None:
                return version
        return 0

    def _start_loading(self, request: LoraRequest, candidate: _Known) -> int:
        path, tensors = request.path, request.tensors
        spec, rank = self._runner.spec, self.config.largest_rank

        def read() -> LoraAdapter:
            if path is not None:
                return read_peft_checkpoint(Path(path), spec, rank)
            assert tensors is not None
            return read_tensors(tensors, spec, rank)

        if path is None and tensors is None:
            raise AdapterError(f"'{request.name}' needs a path")
        version = next(self._versions)
        self._name_of[version] = request.name
        self._candidates[version] = candidate

        def pack() -> PackedAdapter:
            adapter = read()
            self._digests[version] = adapter.digest()
            return self._runner.pack_adapter(adapter)

        self._loading[version] = self._loader.submit(pack)
        return version

    def _finish(self, version: int, future: Future[PackedAdapter]) -> AdapterError | None:
        name, candidate = self._name_of[version], self._candidates.pop(version, None)
        error = None
        try:
            packed = future.result()
            if candidate is not None or self._cache.pinned(version):
                self._keep(version, packed)
        except CacheFull:
            error = AdapterError(
                f"adapter '{name}' has no room: those in use take "
                f"{self._cache.num_bytes} of {self._cache.capacity} bytes (lora_cache_host_memory_bytes)"
            )
        except AdapterError as invalid:
            error = AdapterError(f"adapter '{name}': {invalid}", invalid.field)
        except Exception as failure:
            logger.exception("adapter '%s' could not be loaded", name)
            error = AdapterError(f"adapter '{name}': {type(failure).__name__}: {failure}")
        if candidate is not None:
            self._assign(name, candidate, failed=error is not None)
        self._drop_unless_needed(version)
        return error

    def _keep(self, version: int, packed: PackedAdapter) -> None:
        for evicted in self._cache.put(version, packed):
            self._on_evicted(evicted)
        self.slots.add(version)
        logger.info("adapter '%s' is loaded, %.1f MiB", self._name_of[version], packed.num_bytes / 2**20)

    def _assign(self, name: str, candidate: _Known, *, failed: bool) -> None:
        """Assign a loaded adapter to its name, or record that loading failed."""
        self.revision += 1
        if not failed:
            replaced = self._known.get(name)
            self._known[name] = candidate
            candidate.loaded_before = True
            if replaced is not None and replaced is not candidate:
                self._drop_unless_needed(replaced.version)
        elif candidate.loaded_before:
            candidate.version = 0
        elif self._known.get(name) is candidate:
            del self._known[name]

    def _is_needed(self, version: int) -> bool:
        known = self._known.get(self._name_of.get(version, ""))
        return self._cache.pinned(version) or (known is not None and known.version == version)

    def _drop_unless_needed(self, version: int) -> None:
        if version in self._loading or self._is_needed(version):
            return
        if version in self._cache:
            self.slots.remove(version)
            self._cache.drop(version)
        self._name_of.pop(version, None)
        self._digests.pop(version, None)

    def _on_evicted(self, version: int) -> None:
        """Keep an adapter that has a path, so that it is read again when it is requested."""
        self.slots.remove(version)
        name = self._name_of.pop(version)
        self._digests.pop(version, None)
        known = self._known[name]
        if known.path is None:
            del self._known[name]
        else:
            known.version = 0

    def _unknown(self, name: str) -> AdapterError:
        if name.startswith(TASK_PREFIX):
            return AdapterError(
                f"{name.removeprefix(TASK_PREFIX)} is not cached: send lora_weights and lora_config with it",
                "lora_task_id",
            )
        named = [known for known in self._known if not known.startswith(TASK_PREFIX)]
        return AdapterError(f"LoRA {name} is not supported, we currently support {named}")
