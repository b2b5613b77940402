"""Counters and durations of one model version, reported by the statistics extension."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neso.server.metrics.latency import BucketCounts, ModelLatencies


@dataclass(slots=True)
class Duration:
    """A count of events and their total duration."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns

    def as_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}

    def merged(self, other: Duration) -> Duration:
        """Return the sum of two durations."""
        return Duration(self.count + other.count, self.ns + other.ns)


# Limits the number of counters, and the size of statistics responses, for endless streams.
MAX_RESPONSES = 10_000


class ResponseOutcome(Enum):
    """Outcome of one response; values are names of the statistics extension."""

    SUCCESS = "success"
    FAIL = "fail"
    EMPTY_RESPONSE = "empty_response"
    CANCEL = "cancel"


_COMPUTED = (ResponseOutcome.SUCCESS, ResponseOutcome.FAIL)


@dataclass(slots=True)
class ResponseDurations:
    """Durations of the responses with one index. Empty and cancelled responses have no compute durations."""

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {name: getattr(self, name).as_dict() for name in self.__slots__}

    def merged(self, other: ResponseDurations) -> ResponseDurations:
        """Return the sums of the durations."""
        return ResponseDurations(
            *(getattr(self, name).merged(getattr(other, name)) for name in self.__slots__)
        )


class ResponseStatistics:
    """Response statistics of a model; of a decoupled model by the index of the response in its request.

    The duration of a response starts when the previous response was created (first response: when the computation
    started) and ends when the frontend receives it. The part until its creation is `compute_infer`, the rest is
    `compute_output`. Only the first `MAX_RESPONSES` responses of a request are counted.

    `first_response_ms`: histogram of the time to the first response, in milliseconds, if enabled.
    """

    def __init__(self, first_response_ms: BucketCounts | None = None) -> None:
        self.first_response_ms = first_response_ms
        self._by_index: list[ResponseDurations] = []

    def record(self, timeline: Timeline, created_ns: int, outcome: ResponseOutcome) -> None:
        """Record the next response of a request. `created_ns`: its creation time, in ns of the monotonic clock."""
        end = time.monotonic_ns()
        start = timeline.response_start or timeline.compute_start or timeline.queue_start
        created_ns = min(max(created_ns, start), end)
        index = timeline.responses
        timeline.responses += 1
        timeline.response_start = created_ns
        if index >= MAX_RESPONSES:
            return
        if index == 0:
            self.record_first(timeline)
        if index == len(self._by_index):
            self._by_index.append(ResponseDurations())
        durations = self._by_index[index]
        if outcome in _COMPUTED:
            durations.compute_infer.add(created_ns - start)
            durations.compute_output.add(end - created_ns)
        getattr(durations, outcome.value).add(end - start)

    def record_first(self, timeline: Timeline) -> None:
        """Record the time to the first response of a request, of decoupled and other models, in the histogram."""
        if self.first_response_ms is not None:
            self.first_response_ms.observe((time.monotonic_ns() - timeline.queue_start) / 1e6)

    def as_dict(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the statistics by index, as in the statistics extension; {} for models that are not decoupled."""
        return {str(index): durations.as_dict() for index, durations in enumerate(self._by_index)}

    def merged(self, other: ResponseStatistics) -> ResponseStatistics:
        """Return the sums of the statistics of two processes."""
        histogram = self.first_response_ms
        if histogram is not None and other.first_response_ms is not None:
            histogram = histogram.merged(other.first_response_ms)
        result = ResponseStatistics(histogram)
        shorter, longer = sorted((self._by_index, other._by_index), key=len)
        result._by_index = [a.merged(b) for a, b in zip(shorter, longer, strict=False)] + longer[
            len(shorter) :
        ]
        return result


class FailureReason(str, Enum):
    """Why a request failed; values of the `reason` label in metrics."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass(slots=True)
class Timeline:
    """Start times of the stages of a request, in ns of the monotonic clock; 0 if not reached or unknown.

    queue_start → compute_start → input_end → output_start → final response. The backend sets the times that it knows;
    the other stages get a duration of 0.

    - compute: durations of compute input, infer and output, in ns, of a request that consists of other requests
    - responses: number of responses so far
    - response_start: start of the work on the next response; set by the backend if before `compute_start`
    """

    queue_start: int = field(default_factory=time.monotonic_ns)
    compute_start: int = 0
    input_end: int = 0
    output_start: int = 0
    compute: tuple[int, int, int] | None = None
    responses: int = 0
    response_start: int = 0

    @property
    def executed(self) -> bool:
        """Whether the model itself has executed the request: false for an ensemble, whose steps execute requests."""
        return bool(self.compute_start) and self.compute is None

    def stages(self, end: int) -> tuple[int, int, int, int]:
        """Return the durations of queue, compute input, infer and output, in ns."""
        start = self.compute_start or self.queue_start
        if self.compute is not None:
            return start - self.queue_start, *self.compute
        input_end = self.input_end or start
        output_start = self.output_start or end
        return start - self.queue_start, input_end - start, output_start - input_end, end - output_start


@dataclass(slots=True)
class BatchStatistics:
    """Durations of the executions with one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def merged(self, other: BatchStatistics) -> BatchStatistics:
        """Return the sums of the durations."""
        return BatchStatistics(
            self.compute_input.merged(other.compute_input),
            self.compute_infer.merged(other.compute_infer),
            self.compute_output.merged(other.compute_output),
        )


_DURATIONS = (
    *("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"),
    *("cache_hit", "cache_miss"),
)


class ModelStatistics:
    """Statistics of a model version. Written on the core's loop, read from any thread.

    A request is counted when it has ended; requests that fail validation are not counted.
    `latencies`, `first_response_ms`: optional latency metrics.
    """

    def __init__(
        self,
        name: str,
        version: str,
        latencies: ModelLatencies | None = None,
        first_response_ms: BucketCounts | None = None,
    ) -> None:
        self.latencies = latencies
        self.name = name
        self.version = version
        self.last_inference_ms = 0
        self.inference_count = 0
        self.execution_count = 0
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.cache_hit = Duration()
        self.cache_miss = Duration()
        self.failures = dict.fromkeys(FailureReason, 0)
        self.batches: dict[int, BatchStatistics] = {}
        self.responses = ResponseStatistics(first_response_ms)

    def record_success(self, timeline: Timeline, batch_size: int) -> None:
        """Record a successful request. `batch_size` is 1 for models that do not batch."""
        end = time.monotonic_ns()
        queue, compute_input, infer, output = timeline.stages(end)
        self.success.add(end - timeline.queue_start)
        self.queue.add(queue)
        self.compute_input.add(compute_input)
        self.compute_infer.add(infer)
        self.compute_output.add(output)
        self.inference_count += batch_size
        self.last_inference_ms = time.time_ns() // 1_000_000
        if self.latencies is not None:
            self.latencies.add_success(end, end - timeline.queue_start, (queue, compute_input, infer, output))

    def record_cache_hit(self, timeline: Timeline, ns: int) -> None:
        """Record a request answered by the response cache after a lookup of `ns`. It does not count as an inference."""
        end = time.monotonic_ns()
        total = end - timeline.queue_start
        queue = max(total - ns, 0)
        self.success.add(total)
        self.queue.add(queue)
        self.cache_hit.add(ns)
        self.last_inference_ms = time.time_ns() // 1_000_000
        if self.latencies is not None:
            self.latencies.add_cache_hit(end, queue, ns)

    def record_cache_miss(self, ns: int) -> None:
        """Record the `ns` spent on lookup and insertion for a request that was not in the response cache."""
        self.cache_miss.add(ns)
        if self.latencies is not None:
            self.latencies.cache_miss.add(ns, time.monotonic_ns())

    def record_failure(self, timeline: Timeline, reason: FailureReason) -> None:
        """Record a failed request."""
        self.fail.add(time.monotonic_ns() - timeline.queue_start)
        self.failures[reason] += 1

    def record_execution(self, batch_size: int, timeline: Timeline) -> None:
        """Record one execution with a total batch size."""
        _, compute_input, infer, output = timeline.stages(time.monotonic_ns())
        self.execution_count += 1
        batch = self.batches.get(batch_size)
        if batch is None:
            batch = self.batches[batch_size] = BatchStatistics()
        batch.compute_input.add(compute_input)
        batch.compute_infer.add(infer)
        batch.compute_output.add(output)

    def merged(self, other: ModelStatistics) -> ModelStatistics:
        """Return the sums of the statistics of two processes."""
        latencies = self.latencies
        if latencies is not None and other.latencies is not None:
            latencies = latencies.merged(other.latencies)
        result = ModelStatistics(self.name, self.version, latencies)
        result.responses = self.responses.merged(other.responses)
        result.last_inference_ms = max(self.last_inference_ms, other.last_inference_ms)
        result.inference_count = self.inference_count + other.inference_count
        result.execution_count = self.execution_count + other.execution_count
        for name in _DURATIONS:
            setattr(result, name, getattr(self, name).merged(getattr(other, name)))
        result.failures = {
            reason: count + other.failures.get(reason, 0) for reason, count in self.failures.items()
        }
        result.batches = dict(self.batches)
        for size, batch in other.batches.items():
            known = result.batches.get(size)
            result.batches[size] = batch if known is None else known.merged(batch)
        return result

    def snapshot(self) -> dict[str, Any]:
        """Return the current values, with the field names of the statistics extension."""
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {
                "success": self.success.as_dict(),
                "fail": self.fail.as_dict(),
                "queue": self.queue.as_dict(),
                "compute_input": self.compute_input.as_dict(),
                "compute_infer": self.compute_infer.as_dict(),
                "compute_output": self.compute_output.as_dict(),
                "cache_hit": self.cache_hit.as_dict(),
                "cache_miss": self.cache_miss.as_dict(),
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": batch.compute_input.as_dict(),
                    "compute_infer": batch.compute_infer.as_dict(),
                    "compute_output": batch.compute_output.as_dict(),
                }
                for size, batch in sorted(self.batches.items())
            ],
            "response_stats": self.responses.as_dict(),
        }
