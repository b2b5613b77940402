"""Detects a hanging step, and writes stack traces and plans to a folder."""

from __future__ import annotations

import faulthandler
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from neso.engine.config import EngineConfig
from neso.engine.diagnostics.replay import StepRecorder
from neso.engine.encoders.encoder_core import EncoderCore
from neso.engine.loop.engine_core import EngineCore

logger = logging.getLogger(__name__)

HANG_STATUS = 86
"""Exit status of an engine process whose step hangs."""
DEVICE_LOST_STATUS = 87
"""Exit status of an engine process whose GPU can run no further step."""


class StepWatchdog:
    """A thread that checks the duration of the running step.

    When a step takes longer than `config.step_timeout` seconds, the stack traces of all threads and the last plans of a
    decoder are written to a folder whose path is logged, then `on_hang` is called. A step that hangs while it holds the
    GIL is not detected, because this thread cannot run either.
    """

    def __init__(
        self, core: EngineCore | EncoderCore, config: EngineConfig, on_hang: Callable[[], None]
    ) -> None:
        self._core, self._config, self._on_hang = core, config, on_hang
        self._started: float | None = None
        self._closed = threading.Event()
        if config.step_timeout:
            threading.Thread(target=self._watch, name="step-watchdog", daemon=True).start()

    def begin(self) -> None:
        """Record the start of a step."""
        self._started = time.monotonic()

    def end(self) -> None:
        """Record the end of a step."""
        self._started = None

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _watch(self) -> None:
        timeout, reported = self._config.step_timeout, None
        while not self._closed.wait(min(timeout / 4, 5.0)):
            started = self._started
            if started is None or started == reported or time.monotonic() - started < timeout:
                continue
            reported = started
            self._report()
            self._on_hang()

    def _report(self) -> None:
        seconds = self._config.step_timeout
        try:
            folder = self._dump()
        except Exception:
            logger.critical(
                "a step has taken more than %g s, and its state could not be written", seconds, exc_info=True
            )
        else:
            logger.critical("a step has taken more than %g s; stacks and plans are in %s", seconds, folder)

    def _dump(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="neso-hang-"))
        with (folder / "stacks.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        if isinstance(self._core, EngineCore):
            self._record_plans(self._core, folder)
        return folder

    def _record_plans(self, core: EngineCore, folder: Path) -> None:
        kv = core.scheduler.kv
        recorder = StepRecorder(folder, self._config, kv.pool.num_blocks, kv.prefix_cache.host.num_blocks)
        for plan in list(core.recent_plans):
            recorder.record(plan)
