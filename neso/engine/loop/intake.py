"""Requests on their way to the scheduler: what each of them waits for before it may be scheduled."""

from __future__ import annotations

import logging
from collections.abc import Callable

from neso.engine.core.admission import QueueFull
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.guided.grammar import GrammarError, refused
from neso.engine.guided.guides import Guides
from neso.engine.loop.failed_requests import fail_requests
from neso.engine.lora.config import AdapterError
from neso.engine.lora.manager import LoraManager
from neso.engine.spec_decode.request_draft import draft_of
from neso.engine.vision.image_encoder import ImageEncoder

logger = logging.getLogger(__name__)

_POLL = 0.005
"""Seconds that a step without work waits for a grammar or an adapter: new requests are looked for as often."""


class Intake:
    """Holds a request until its grammar is compiled, finds its adapter and images, then queues it.

    `on_queued` is told of every sequence that is.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        guides: Guides,
        lora: LoraManager | None,
        images: ImageEncoder | None,
        on_queued: Callable[[Sequence], None],
    ) -> None:
        self.images = images
        self._scheduler, self._guides, self._lora = scheduler, guides, lora
        self._on_queued = on_queued

    @property
    def waits(self) -> bool:
        """Whether there are requests that the scheduler cannot run yet."""
        return self._guides.num_held > 0 or (self._lora is not None and self._lora.loading)

    def add(self, request: EngineRequest) -> list[SequenceOutput]:
        """Take a request; one that can never run is answered at once with an error."""
        try:
            if self._guides.hold(request):
                return []
        except GrammarError as error:
            return [refused(request, error)]
        except ValueError as error:
            return [SequenceOutput.failed(request.request_id, 0, str(error))]
        return self._queue(request)

    def take(self) -> list[SequenceOutput]:
        """Let go on what has what it waited for; the answers to those that cannot, or have waited for too long."""
        outputs = self._refuse_expired()
        for request, error in self._guides.take_ready():
            outputs += self._queue(request) if error is None else [refused(request, error)]
        return outputs if self._lora is None else outputs + self._take_adapters(self._lora)

    def wait(self) -> None:
        """Let a little time go by, if anything is waited for."""
        self._guides.wait(_POLL)
        if self._lora is not None:
            self._lora.wait(_POLL)

    def _queue(self, request: EngineRequest) -> list[SequenceOutput]:
        try:
            if self._lora is not None:
                request = self._lora.resolve(request)
            sequence = self._scheduler.add(request)
        except (ValueError, QueueFull) as error:
            if not self._scheduler.sequences_of(request.request_id):
                self._guides.drop(request.request_id)
            busy, field = isinstance(error, QueueFull), error.field if isinstance(error, AdapterError) else ""
            return [SequenceOutput.failed(request.request_id, 0, str(error), refused=busy, error_field=field)]
        try:
            self._furnish(sequence)
        except Exception as error:
            logger.exception("request '%s' failed before its first step", request.request_id)
            return fail_requests(self._scheduler, [sequence], f"the request failed: {error}")
        return []

    def _furnish(self, sequence: Sequence) -> None:
        """Give a sequence what it has beside its tokens."""
        request = sequence.request
        if self._lora is not None:
            self._lora.pin(request)
        if request.images and self.images is not None:
            sequence.embedding_rows = self.images.embedding_rows(request.images)
        sequence.draft = draft_of(request)
        self._on_queued(sequence)

    def _refuse_expired(self) -> list[SequenceOutput]:
        outputs = []
        for sequence in self._scheduler.waiting.expired():
            message = f"the request has waited for queue_timeout_ms, {sequence.request.queue_timeout_ms:g} ms"
            outputs += fail_requests(self._scheduler, [sequence], message, refused=True)
        return outputs

    def _take_adapters(self, lora: LoraManager) -> list[SequenceOutput]:
        """Let those run whose adapters have come, fail those whose adapters cannot be loaded."""
        outputs = []
        for loaded in lora.take_loaded():
            if loaded.error is not None:
                users = [s for s in self._scheduler.waiting if s.request.adapter == loaded.version]
                message, field = str(loaded.error), loaded.error.field
                outputs += fail_requests(self._scheduler, users, message, error_field=field)
        return outputs
