"""What the outputs of an engine tell of the times of a request."""

from __future__ import annotations

import time

from neso.generation import GenerationOutput, GenerationRequest
from neso.server.inference_response import ResponseStream


class FollowedGeneration:
    """Notes times for statistics and, where the request is traced, for the trace.

    `request` is what the engine is asked, None where that is several: then nothing is traced of it.
    """

    def __init__(self, stream: ResponseStream, request: GenerationRequest | None) -> None:
        self._timeline = stream.timeline
        # The first response took from here on; when the engine began with the prompt, its first output tells.
        self._timeline.response_start = self._timeline.queue_start
        trace = stream.trace
        self._traced = None if trace is None or request is None else trace.begin_generation(request)

    def observe(self, output: GenerationOutput) -> None:
        """Take an output in, before what it says is sent."""
        if not self._timeline.compute_start:
            self._timeline.compute_start = output.scheduled_ns or time.monotonic_ns()
        if self._traced is not None:
            self._traced.observe(output)
