"""How the responses of a decoupled model fare, by their place in the answer to a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from neso.server.duration import Duration

if TYPE_CHECKING:
    from neso.server.metrics.histogram import Histogram
    from neso.server.statistics import Timeline

# A stream may go on for days; the counters must not grow with it, nor the answers that list them.
MAX_RESPONSES = 10_000


class ResponseOutcome(Enum):
    """What became of one response; by the names of the statistics extension."""

    SUCCESS = "success"
    FAIL = "fail"
    EMPTY_RESPONSE = "empty_response"
    CANCEL = "cancel"


_COMPUTED = (ResponseOutcome.SUCCESS, ResponseOutcome.FAIL)


@dataclass(slots=True)
class ResponseDurations:
    """Of the responses at one place. Those that are empty or cancelled have not been computed."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {name: getattr(self, name).as_dict() for name in self.__slots__}


class ResponseStatistics:
    """Counts the responses of a model version; place 0 is the first of each request.

    A response takes from when the one before it was made (the first: from when the backend began to compute)
    until it has reached the front end. The part up to when it was made itself is `compute_infer`, the rest is
    `compute_output`. From place `MAX_RESPONSES` on, responses are not counted.

    `first_response_ms`: milliseconds from a request to its first response, if that is measured.
    """

    def __init__(self, first_response_ms: Histogram | None = None) -> None:
        self.first_response_ms = first_response_ms
        self._places: list[ResponseDurations] = []

    def record(self, timeline: Timeline, made: int, outcome: ResponseOutcome) -> None:
        """The next response of a request has reached the front end. `made`: when, in ns of the monotonic clock."""
        end = time.monotonic_ns()
        start = timeline.response_start or timeline.compute_start or timeline.queue_start
        made = min(max(made, start), end)
        place = timeline.responses
        timeline.responses += 1
        timeline.response_start = made
        if place >= MAX_RESPONSES:
            return
        if place == 0:
            self.record_first(timeline, end)
        if place == len(self._places):
            self._places.append(ResponseDurations())
        durations = self._places[place]
        if outcome in _COMPUTED:
            durations.compute_infer.add(made - start)
            durations.compute_output.add(end - made)
        getattr(durations, outcome.value).add(end - start)

    def record_first(self, timeline: Timeline, end: int) -> None:
        """The first response to a request has reached the front end at `end`, in ns of the monotonic clock."""
        if self.first_response_ms is not None:
            self.first_response_ms.observe((end - timeline.queue_start) / 1e6)

    def as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """By place, in the form of the statistics extension; {} for models that are not decoupled."""
        return {str(place): durations.as_dict() for place, durations in enumerate(self._places)}
