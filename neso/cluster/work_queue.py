"""The work queue of a front end: requests that wait, and requests that a worker has taken.

A request is put once and stays in the queue until it is acknowledged. A worker takes it by a grant, which reserves the
request's cost in the worker's credits. A request of a lost worker waits again, in its old place, with the next attempt
number. The number is a fencing token: whatever an earlier attempt still sends is dropped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import msgspec

from neso.cluster.messages import Cost, Credits, Frame
from neso.cluster.request_trace import RequestTrace
from neso.cluster.speed import StepTime
from neso.cluster.worker_prefixes import WorkerPrefixes
from neso.engine.client.engine_load import UNCACHED_COST, Load, RoutedRequest
from neso.engine.client.prefix_estimate import PrefixEstimate, PrefixKeys
from neso.engine.cluster_config import DEFAULT_TRACKED_BLOCKS, MIXED, Roles
from neso.engine.core.admission import WaitingQueue
from neso.engine.core.request import EngineRequest, SequenceOutput
from neso.engine.core.sequence import Sequence as QueuedSequence
from neso.engine.core.stats import EngineStats
from neso.engine.ipc.messages import EngineInfo
from neso.generation import LoraRequest

WINDOW = 32
"""Number of oldest waiting requests among which the router chooses."""


class WrongContinuation(Exception):
    """An attempt has generated other tokens than those that were delivered before."""


class Delivered:
    """What was delivered of a request: the front end passes on each token once, whatever attempts send."""

    def __init__(self, num_outputs: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_outputs)]
        self.open = set(range(num_outputs))
        """Indices of sequences that have not ended."""
        self._prompt_logprobs = 0
        self._context_bytes = 0
        self._attempt = 0
        self._seen_prompt_logprobs = self._seen_context_bytes = 0  # of the present attempt

    @property
    def any(self) -> bool:
        """Whether a token was delivered."""
        return any(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Number of delivered tokens of all outputs."""
        return sum(map(len, self.tokens))

    def take(self, frame: Frame) -> SequenceOutput | None:
        """Return the part of an output that is new; None if there is none. Raises `WrongContinuation`."""
        output = frame.output
        if output.index not in self.open:
            return None
        if frame.attempt != self._attempt:
            self._attempt, self._seen_prompt_logprobs, self._seen_context_bytes = frame.attempt, 0, 0
        output = self._without_known_prompt(output)
        known, new = self.tokens[output.index], output.token_ids
        overlap = len(known) - frame.start
        if overlap < 0:
            raise WrongContinuation(f"token {len(known)} is missing, the next one is {frame.start}")
        if overlap:
            repeated = new[:overlap]
            if repeated != known[frame.start : frame.start + len(repeated)]:
                raise WrongContinuation(f"the tokens from index {frame.start} differ from those delivered")
            output = _without_first(output, len(repeated))
            if not (output.token_ids or output.finish_reason is not None or output.prompt_logprobs):
                return None
        known += output.token_ids
        if output.finish_reason is not None:
            self.open.discard(output.index)
        return output

    def _without_known_prompt(self, output: SequenceOutput) -> SequenceOutput:
        """Remove values of prompt positions that an earlier attempt has delivered."""
        if not output.prompt_logprobs and not output.context_logits:
            return output
        skip = self._prompt_logprobs - self._seen_prompt_logprobs
        skip_bytes = self._context_bytes - self._seen_context_bytes
        self._seen_prompt_logprobs += len(output.prompt_logprobs)
        self._seen_context_bytes += len(output.context_logits)
        self._prompt_logprobs = max(self._prompt_logprobs, self._seen_prompt_logprobs)
        self._context_bytes = max(self._context_bytes, self._seen_context_bytes)
        return msgspec.structs.replace(
            output,
            prompt_logprobs=output.prompt_logprobs[max(0, skip) :],
            context_logits=output.context_logits[max(0, skip_bytes) :],
        )


def _without_first(output: SequenceOutput, count: int) -> SequenceOutput:
    """Return an output without its first `count` tokens."""
    row = len(output.generation_logits) // len(output.token_ids) if output.token_ids else 0
    return msgspec.structs.replace(
        output,
        token_ids=output.token_ids[count:],
        logprobs=output.logprobs[count:],
        generation_logits=output.generation_logits[count * row :],
        draft_tokens=0,
        accepted_draft_tokens=0,
    )


@dataclass(slots=True)
class Export:
    """The prompt of a request on the worker that computes it, or holds its blocks, for the worker that decodes.

    `num_uncached`: tokens to compute, 0 afterwards; `num_ahead`: these and those of earlier requests, at the grant;
    `touched`: time of the grant or of the last extension of the lease.
    """

    worker: WorkerState
    transfer_id: str
    attempt: int
    num_uncached: int
    num_ahead: int
    touched: float


class Job:
    """A request in the queue. `worker`: None while it waits; `num_uncached`: its prompt tokens without an output.

    `export`: its prompt, if another worker computes it; None after the first output.
    """

    def __init__(self, request: EngineRequest, keys: PrefixKeys | None, arrived: float) -> None:
        self.request, self.keys, self.arrived = request, keys, arrived
        self.num_sequences = 1 if request.pooling is not None else request.sampling.num_sequences
        self.delivered = Delivered(1 if request.pooling is not None else request.sampling.num_outputs)
        self.attempt = 1
        self.worker: WorkerState | None = None
        self.entry: QueuedSequence | None = None
        self.waiting_since = arrived
        self.granted = 0.0
        self.last_output: float | None = None  # of the present attempt
        self.num_uncached = self.num_ahead = 0
        self.export: Export | None = None
        self.can_import = (
            request.pooling is None and request.draft is None and not request.sampling.needs_prompt_scores
        )
        """Whether another worker can compute the prompt: nothing but its keys and values is needed."""
        self.trace: RequestTrace | None = None

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def lora(self) -> LoraRequest | None:
        return self.request.lora

    def cost(self, worker: WorkerState, *, remote: bool = False) -> Cost:
        """Return what the request takes of a worker. Blocks for its output are not reserved: the engine preempts.

        `remote`: another worker computes the prompt.
        """
        blocks = (
            -(-self.num_prompt_tokens // worker.block_size) + self.num_sequences if worker.num_blocks else 0
        )
        return Cost(self.num_sequences, blocks, 0 if remote else worker.uncached_tokens(self))


class WorkerState(Load):
    """A worker as the front end knows it: its credits, the grants that these do not include, its requests."""

    def __init__(
        self,
        name: str,
        info: EngineInfo,
        roles: Roles = MIXED,
        max_tracked_blocks: int = DEFAULT_TRACKED_BLOCKS,
    ) -> None:
        super().__init__(info.block_size, PrefixEstimate(info.num_blocks))
        self.blocks = WorkerPrefixes(name, self.prefixes, max_tracked_blocks)
        self.name, self.info, self.roles = name, info, roles
        self.num_blocks = info.num_blocks
        self.stats = EngineStats(num_blocks=info.num_blocks)
        self.credits = Credits()
        self.jobs: dict[str, Job] = {}
        self.exports: dict[str, Job] = {}
        """Requests whose prompts the worker computes, or holds, for others."""
        self.loras: dict[str, str | None] = {}
        self.itl = 0.0
        """Measured seconds between two tokens of a sequence."""
        self.speed, self.measured_at = StepTime(), 0.0
        self.decode_speed = StepTime(decay=0.999)
        """Time between two tokens by the number of sequences, of steps without prompts."""
        self.num_generating = 1
        """Number of sequences that have generated tokens in the last step."""
        self._only_decodes = True
        self.slowness = 1.0
        """Time of a prompt compared with the fastest worker, see `measure_slowness`."""
        self._num_grants = 0
        self._unseen: list[tuple[int, Cost]] = []

    def held_blocks(self, keys: PrefixKeys) -> int:
        return self.blocks.match(keys)

    def add(self, request: RoutedRequest) -> int:
        num_uncached = super().add(request)
        self.blocks.add(request)
        return num_uncached

    def remove(self, request: RoutedRequest, num_uncached: int) -> None:
        super().remove(request, num_uncached)
        self.blocks.remove(request)

    def update(self, credits: Credits) -> None:
        """Use the credits of a report, before its outputs, and forget the grants that they include."""
        self.credits = credits
        self._only_decodes = not self.num_prefill_tokens
        self._unseen = [entry for entry in self._unseen if entry[0] > credits.grants]

    def has_room(self, job: Job, *, remote: bool = False) -> bool:
        """Whether the worker can take a request now. `remote`: another worker computes the prompt."""
        reserved = Cost()
        for _, cost in self._unseen:
            reserved = reserved.plus(cost)
        return self.credits.cover(reserved, job.cost(self, remote=remote))

    def reserve(self, cost: Cost) -> None:
        """Count a grant."""
        self._num_grants += 1
        self._unseen.append((self._num_grants, cost))

    def observe_tokens(self, seconds: float, tokens: int) -> None:
        """Record the time of tokens after the first one."""
        self.itl = 0.9 * self.itl + 0.1 * seconds / tokens if self.itl else seconds / tokens
        if self._only_decodes:
            self.decode_speed.observe(seconds / tokens, self.num_generating)

    def observe_prefill(self, seconds: float, tokens: int, now: float = 0.0) -> None:
        """Record the time from a grant to its first output.

        `tokens`: to compute at the grant, of all requests; `now`: in seconds of the clock of the queue.
        """
        self.speed.observe(seconds, max(1, tokens))
        self.measured_at = now

    @property
    def seconds_per_token(self) -> float:
        """Measured time to prefill a token; 0: not known."""
        return self.speed.slope

    def cost(self, request: RoutedRequest) -> float:
        return self.slowness * super().cost(request)

    def transfer_seconds(self, tokens: int) -> float:
        """Return the seconds that the transfer of the blocks of `tokens` takes, at the speed of the transfers so far.

        0 before the first transfer.
        """
        transfers, own = self.stats.kv_transfer, self.info.kv_format
        if own is None or not transfers.imported_bytes:
            return 0.0
        num_bytes = tokens / self.block_size * own.block_bytes
        return num_bytes * transfers.import_seconds / transfers.imported_bytes

    def import_cost(self, job: Job) -> float:
        """Return the cost of a request whose prompt another worker computes, in the unit of `cost`.

        The blocks that are missing here take the time of their transfer.
        """
        missing = self.uncached_tokens(job)
        cost = super().cost(job) - UNCACHED_COST * missing
        seconds = self.transfer_seconds(missing)
        if seconds and self.seconds_per_token:
            missing = min(missing, round(seconds / self.seconds_per_token))
        return self.slowness * (cost + UNCACHED_COST * missing)


@dataclass(slots=True)
class QueueTotals:
    """Sums since the start.

    - arrived, arrived_tokens: requests that were put, and their prompt tokens
    - granted_tokens, computed_tokens: prompt tokens of granted requests, and those outside the worker's prefix cache
    - finished, output_tokens: requests that have ended, and the tokens that were generated for them
    """

    arrived: int = 0
    arrived_tokens: int = 0
    granted_tokens: int = 0
    computed_tokens: int = 0
    finished: int = 0
    output_tokens: int = 0

    def since(self, earlier: QueueTotals) -> QueueTotals:
        """Return the differences."""
        return QueueTotals(*(getattr(self, name) - getattr(earlier, name) for name in self.__slots__))


class WorkQueue:
    """Requests by priority and arrival. `max_size`: limit of the waiting requests; None for no limit.

    Every request is in one place: waiting, or in `jobs` of the worker that has it.
    """

    def __init__(
        self,
        max_size: int | None = None,
        ageing_seconds: float = 0.0,
        max_attempts: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiting = WaitingQueue(max_size, ageing_seconds, clock)
        self._by_entry: dict[int, Job] = {}
        self._num_put = 0
        self._exports_name = secrets.token_hex(4)  # unique among the queues that share workers
        self._clock = clock
        self.max_attempts = max_attempts
        self.totals = QueueTotals()
        self.jobs: dict[str, Job] = {}

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a worker."""
        return len(self._waiting)

    @property
    def oldest_wait(self) -> float:
        """Seconds that the oldest waiting request has waited; 0 if none waits."""
        since = [job.waiting_since for job in self._by_entry.values()]
        return self._clock() - min(since) if since else 0.0

    def put(self, request: EngineRequest, keys: PrefixKeys | None = None) -> Job:
        """Add a request. Raises `QueueFull`."""
        self._waiting.check_room()
        job = Job(request, keys, self._clock())
        self._num_put += 1
        rank = self._waiting.rank(request.priority, request.queue_delay)
        job.entry = QueuedSequence(id=self._num_put, request=request, arrival=self._num_put, rank=rank)
        self.jobs[job.id] = job
        self.totals.arrived += 1
        self.totals.arrived_tokens += job.num_prompt_tokens
        self._wait(job)
        return job

    def _wait(self, job: Job) -> None:
        assert job.entry is not None
        self._by_entry[job.entry.id] = job
        self._waiting.add(job.entry)

    def window(self) -> list[Job]:
        """Return the first waiting requests in order."""
        return [self._by_entry[entry.id] for entry in islice(self._waiting, WINDOW)]

    def grant(self, job: Job, worker: WorkerState) -> Cost:
        """Give a waiting request to a worker and reserve its cost there.

        If it has an export, the prompt is computed elsewhere: see `grant_prefill`.
        """
        assert job.entry is not None and job.worker is None
        self._waiting.remove(job.entry)
        del self._by_entry[job.entry.id]
        cost = job.cost(worker, remote=job.export is not None)
        worker.reserve(cost)
        job.worker, job.granted, job.last_output = worker, self._clock(), None
        job.num_uncached = worker.add(job)
        if job.export is None:
            self.totals.granted_tokens += job.num_prompt_tokens
            self.totals.computed_tokens += job.num_uncached
        job.num_ahead = worker.num_prefill_tokens
        if job.export is not None:
            worker.num_prefill_tokens -= job.num_uncached
            job.num_uncached = 0
        worker.jobs[job.id] = job
        return cost

    def grant_prefill(self, job: Job, worker: WorkerState) -> Cost:
        """Let a worker compute the prompt of a waiting request, before `grant` gives the request to another one."""
        assert job.export is None
        cost = job.cost(worker)
        worker.reserve(cost)
        transfer_id, num_uncached = f"{self._exports_name}:{job.id}:{job.attempt}", worker.add(job)
        self.totals.granted_tokens += job.num_prompt_tokens
        self.totals.computed_tokens += num_uncached
        job.export = Export(
            worker, transfer_id, job.attempt, num_uncached, worker.num_prefill_tokens, self._clock()
        )
        worker.exports[job.id] = job
        return cost

    def prefilled(self, job: Job) -> None:
        """Record that the prompt is computed: its worker holds the blocks for the other one."""
        export = job.export
        if export is not None and export.num_uncached:
            now = self._clock()
            export.worker.observe_prefill(now - export.touched, export.num_ahead, now)
            export.touched = now
            export.worker.remove(job, export.num_uncached)
            export.num_uncached = 0

    def end_export(self, job: Job) -> Export | None:
        """Forget the export of a request, whose blocks are no longer needed. Returns it."""
        export, job.export = job.export, None
        if export is not None:
            if export.num_uncached:
                export.worker.remove(job, export.num_uncached)
            del export.worker.exports[job.id]
        return export

    def time_left_ms(self, job: Job) -> float | None:
        """Return the rest of a request's queue_timeout_ms for its engine."""
        limit = job.request.queue_timeout_ms
        return None if limit is None else max(0.001, limit - (self._clock() - job.arrived) * 1000)

    def observe(self, job: Job, num_tokens: int) -> None:
        """Record an output of an attempt; with the first one its prefill is done."""
        worker, now = job.worker, self._clock()
        if worker is not None and job.last_output is not None and num_tokens and job.num_sequences == 1:
            worker.observe_tokens(now - job.last_output, num_tokens)
        job.last_output = now
        if worker is not None and job.num_uncached:
            worker.observe_prefill(now - job.granted, job.num_ahead, now)
            worker.num_prefill_tokens -= job.num_uncached
            job.num_uncached = 0

    def ack(self, job: Job) -> None:
        """Remove a request that has ended, was cancelled, or has failed."""
        if self.jobs.pop(job.id, None) is None:
            return
        if not job.delivered.open:
            self.totals.finished += 1
            self.totals.output_tokens += job.delivered.num_tokens
        self._take_back(job)
        if job.entry is not None and job.entry.id in self._by_entry:
            self._waiting.remove(job.entry)
            del self._by_entry[job.entry.id]

    def nack(self, job: Job) -> bool:
        """Let a request of a worker wait again, as the next attempt. Returns False after its last attempt."""
        self._take_back(job)
        if job.attempt >= self.max_attempts:
            return False
        job.attempt += 1
        job.waiting_since = self._clock()
        self._wait(job)
        return True

    def _take_back(self, job: Job) -> None:
        worker, job.worker = job.worker, None
        if worker is not None:
            worker.remove(job, job.num_uncached)
            job.num_uncached = 0
            del worker.jobs[job.id]

    def expired(self) -> list[Job]:
        """Return the requests that have waited for queue_timeout_ms and were never granted; each is returned once."""
        jobs = [self._by_entry.get(entry.id) for entry in self._waiting.expired()]
        return [job for job in jobs if job is not None and job.attempt == 1]

    @property
    def waiting_tokens(self) -> int:
        """Number of prompt tokens of the waiting requests."""
        return sum(job.num_prompt_tokens for job in self._by_entry.values())

    def predicted_wait(self, workers: Iterable[WorkerState]) -> float:
        """Return the seconds in which the workers can prefill what waits; 0 if no speed was measured."""
        tokens = self.waiting_tokens
        speed = sum(1 / worker.seconds_per_token for worker in workers if worker.seconds_per_token)
        return tokens / speed if speed else 0.0
