"""`WorkQueue`: every request is in one place, and every token is delivered once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from neso.cluster.messages import Cost, Credits, Frame
from neso.cluster.work_queue import Delivered, Job, WorkerState, WorkQueue, WrongContinuation
from neso.engine.client.prefix_estimate import PrefixKeys
from neso.engine.core.admission import QueueFull
from neso.engine.core.request import EngineRequest, PositionLogprobs, SequenceOutput
from neso.engine.ipc.messages import EngineInfo
from neso.generation import SamplingParams
from neso.generation.output import FinishReason

BLOCK = 4
INFO = EngineInfo("native", 4096, 4, 384, 64, BLOCK, 2**20, 0.1)
LENGTH = 5
MAX_ATTEMPTS = 3


def make_request(name: str, prompt: list[int] | None = None, **values: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt or [1, 2, 3],
        sampling=values.pop("sampling", SamplingParams()),
        max_tokens=16,
        **values,
    )


def frame(tokens: list[int], start: int, attempt: int = 1, **values: Any) -> Frame:
    return Frame(attempt, start, SequenceOutput(request_id="a", index=0, token_ids=tokens, **values))


class QueueMachine(RuleBasedStateMachine):
    """Workers take requests, generate the tokens 0, 1, 2, ..., are lost, and clients cancel requests."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queue = WorkQueue(max_size=6, max_attempts=MAX_ATTEMPTS, clock=lambda: self.now)
        self.workers = [WorkerState(f"w{number}", INFO) for number in range(3)]
        for worker in self.workers:
            worker.update(Credits(3, 100, 100))
        self.sent: dict[str, int] = {}  # tokens of the present attempt
        self.attempts: dict[str, int] = {}
        self.count = 0

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def put(self, prompt: list[int]) -> None:
        self.now += 1
        request = make_request(f"r{self.count}", prompt)
        if self.queue.num_waiting >= 6:
            with pytest.raises(QueueFull):
                self.queue.put(request)
            return
        self.count += 1
        job = self.queue.put(request, PrefixKeys(request, BLOCK))
        self.attempts[job.id] = 1

    @rule(number=st.integers(0, 2))
    def pull(self, number: int) -> None:
        worker = self.workers[number]
        for job in self.queue.window()[:1]:
            if worker.has_room(job):
                self.queue.grant(job, worker)
                self.sent[job.id] = 0
                assert job.attempt == self.attempts[job.id]

    @rule(number=st.integers(0, 2), data=st.data())
    def generate(self, number: int, data: st.DataObject) -> None:
        jobs = sorted(self.workers[number].jobs)
        if not jobs:
            return
        job = self.queue.jobs[data.draw(st.sampled_from(jobs))]
        start = self.sent[job.id]
        end = min(LENGTH, start + data.draw(st.integers(1, 3)))
        before = list(job.delivered.tokens[0])
        reason = FinishReason.LENGTH if end == LENGTH else None
        self.queue.observe(job, end - start)
        output = SequenceOutput(
            request_id=job.id, index=0, token_ids=[*range(start, end)], finish_reason=reason
        )
        new = job.delivered.take(Frame(job.attempt, start, output))
        self.sent[job.id] = end
        assert before + (new.token_ids if new is not None else []) == job.delivered.tokens[0]
        assert job.delivered.tokens[0] == [*range(max(len(before), end))]
        if not job.delivered.open:
            assert job.delivered.tokens[0] == [*range(LENGTH)]
            self.queue.ack(job)

    @rule(number=st.integers(0, 2))
    def report(self, number: int) -> None:
        worker = self.workers[number]
        worker.update(Credits(3 - len(worker.jobs), 100, 100, worker._num_grants))

    @rule(number=st.integers(0, 2))
    def lose(self, number: int) -> None:
        lost = self.workers[number]
        for job in tuple(lost.jobs.values()):
            self.attempts[job.id] += 1
            if not self.queue.nack(job):
                assert job.attempt == MAX_ATTEMPTS
                self.queue.ack(job)
        assert (lost.num_sequences, lost.num_prefill_tokens) == (0, 0)
        self.workers[number] = WorkerState(lost.name, INFO)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.queue.jobs:
            self.queue.ack(self.queue.jobs[data.draw(st.sampled_from(sorted(self.queue.jobs)))])

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        granted = [job for worker in self.workers for job in worker.jobs.values()]
        waiting = [job for job in self.queue.jobs.values() if job.worker is None]
        assert len(waiting) == self.queue.num_waiting
        assert len(granted) + len(waiting) == len(self.queue.jobs)
        assert all(job.worker is worker for worker in self.workers for job in worker.jobs.values())
        for worker in self.workers:
            assert worker.num_sequences == len(worker.jobs)
            assert worker.num_prefill_tokens == sum(job.num_uncached for job in worker.jobs.values())


TestQueueMachine = QueueMachine.TestCase


def test_requests_of_a_lost_worker_keep_their_place():
    queue = WorkQueue(ageing_seconds=10.0, clock=lambda: 0.0)
    worker = WorkerState("w", INFO)
    worker.update(Credits(idle=True))
    first = queue.put(make_request("first"))
    queue.grant(first, worker)
    queue.put(make_request("second"))
    assert queue.nack(first)
    assert [job.id for job in queue.window()] == ["first", "second"]
    assert first.attempt == 2


def test_lower_priority_number_goes_first():
    queue = WorkQueue(clock=lambda: 0.0)
    for name, priority in (("late", 1), ("soon", 0)):
        queue.put(make_request(name, priority=priority))
    assert [job.id for job in queue.window()] == ["soon", "late"]


def test_expired_requests_are_returned_once():
    now = 0.0
    queue = WorkQueue(clock=lambda: now)
    job = queue.put(make_request("a", queue_timeout_ms=1000.0))
    assert queue.expired() == []
    now = 2.0
    assert queue.expired() == [job]
    assert queue.expired() == []


def test_grants_that_the_worker_has_not_seen_are_reserved():
    queue = WorkQueue(clock=lambda: 0.0)
    worker = WorkerState("w", INFO)
    worker.update(Credits(sequences=2, blocks=100, prefill_tokens=100))
    jobs = [queue.put(make_request(name)) for name in "abc"]
    for job in jobs[:2]:
        assert worker.has_room(job)
        queue.grant(job, worker)
    assert not worker.has_room(jobs[2])
    # Credits from before the second grant: one of the two sequences is still taken by it.
    worker.update(Credits(sequences=1, blocks=100, prefill_tokens=100, grants=1))
    assert not worker.has_room(jobs[2])
    worker.update(Credits(sequences=1, blocks=100, prefill_tokens=100, grants=2))
    assert worker.has_room(jobs[2])


def test_credits_limit_sequences_blocks_and_prefill_tokens():
    credits = Credits(sequences=2, blocks=10, prefill_tokens=100)
    assert credits.cover(Cost(), Cost(2, 10, 5000))  # the last prompt may exceed the budget
    assert not credits.cover(Cost(), Cost(3, 1, 1))
    assert not credits.cover(Cost(), Cost(1, 11, 1))
    assert not credits.cover(Cost(1, 1, 100), Cost(1, 1, 1))
    assert Credits(idle=True).cover(Cost(), Cost(9, 999, 9999))
    assert not Credits(idle=True).cover(Cost(1, 1, 1), Cost(1, 1, 1))


def test_predicted_wait_follows_from_the_measured_speed():
    queue = WorkQueue(clock=lambda: 0.0)
    worker = WorkerState("w", INFO)
    queue.put(make_request("a", [1] * 300))
    assert queue.predicted_wait([worker]) == 0.0
    worker.observe_prefill(2.0, 100)
    assert queue.predicted_wait([worker, worker]) == pytest.approx(3.0)


def test_repeated_tokens_are_trimmed_with_their_values():
    delivered = Delivered(1)
    scores = [PositionLogprobs(token, -1.0, 1, [], []) for token in (7, 8, 9)]
    rows = b"aaaabbbbcccc"
    assert delivered.take(frame([7, 8], 0)) is not None
    again = delivered.take(frame([7, 8, 9], 0, 2, logprobs=scores, generation_logits=rows))
    assert again is not None
    assert (again.token_ids, again.logprobs, again.generation_logits) == ([9], scores[2:], b"cccc")
    assert delivered.take(frame([7], 0, 2)) is None


def test_other_tokens_than_those_delivered_are_an_error():
    delivered = Delivered(1)
    delivered.take(frame([7, 8], 0))
    with pytest.raises(WrongContinuation, match="differ"):
        delivered.take(frame([7, 9], 0, 2))
    with pytest.raises(WrongContinuation, match="token 2 is missing"):
        delivered.take(frame([9], 3, 2))


def test_prompt_log_probabilities_are_delivered_once():
    delivered = Delivered(1)
    scores = [PositionLogprobs(token, -1.0, 1, [], []) for token in (1, 2, 3)]
    first = delivered.take(frame([], 0, prompt_logprobs=scores[:2], context_logits=b"12"))
    assert first is not None and first.prompt_logprobs == scores[:2]
    second = delivered.take(frame([5], 0, 2, prompt_logprobs=scores, context_logits=b"123"))
    assert second is not None and second.prompt_logprobs == scores[2:] and second.context_logits == b"3"


def test_ended_sequences_output_nothing():
    delivered = Delivered(1)
    assert delivered.take(frame([7], 0, finish_reason=FinishReason.LENGTH)) is not None
    assert delivered.take(frame([8], 1)) is None


def test_sequences_of_a_request_are_counted():
    request = make_request("a", sampling=SamplingParams(n=3))
    job = Job(request, None, 0.0)
    assert job.cost(WorkerState("w", INFO)) == Cost(3, 4, 3)
    without_cache = WorkerState("w", msgspec.structs.replace(INFO, num_blocks=0))
    assert job.cost(without_cache).blocks == 0
