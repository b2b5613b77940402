"""The queue of the encoder engine: composition of steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from neso.engine.core.request import EngineRequest
from neso.engine.core.scheduler_config import SchedulerConfig
from neso.engine.encoders.encoder_core import EncoderCore
from neso.engine.pooling.pooler import Pooler
from neso.generation import FinishReason, PoolingParams, SamplingParams


class FakeEncoder:
    """The vectors are the token ids; `batches` records the lengths of each batch."""

    classifier = None

    def __init__(self) -> None:
        self.layers = SimpleNamespace(has_lost_device=lambda: self.lost)
        self.lost = False
        self.batches: list[list[int]] = []

    def encode(self, batch):
        if 99 in batch.token_ids:
            raise RuntimeError("broken")
        self.batches.append(np.diff(batch.starts).tolist())
        return batch.token_ids[:, None].astype(np.float32)


@pytest.fixture
def encoder():
    return FakeEncoder()


def make_core(encoder, **options) -> EncoderCore:
    return EncoderCore(encoder, Pooler("mean", normalize=False), SchedulerConfig(**options))


def request(name: str, ids: list[int], **fields) -> EngineRequest:
    params = fields.pop("pooling", PoolingParams(pooling="mean"))
    return EngineRequest(
        request_id=name,
        prompt_token_ids=ids,
        sampling=SamplingParams(),
        max_tokens=1,
        pooling=params,
        **fields,
    )


def vectors(outputs) -> dict[str, list[float]]:
    return {o.request_id: np.frombuffer(o.pooled, np.float32).tolist() for o in outputs}


def test_steps_respect_the_budgets(encoder):
    core = make_core(encoder, max_num_batched_tokens=10, max_num_seqs=3)
    for name, length in zip("abcdefg", (4, 4, 4, 30, 1, 1, 1), strict=True):
        assert core.add(request(name, [7] * length)) == []
    outputs = []
    while core.has_work:
        outputs += core.step()
    # A text longer than the budget runs in its own step.
    assert encoder.batches == [[4, 4], [4], [30], [1, 1, 1]]
    assert vectors(outputs) == {name: [7.0] for name in "abcdefg"}
    assert core.step() == [] and core.stats().num_batched_tokens == 3


def test_high_priority_runs_first_and_aborted_requests_do_not_run(encoder):
    core = make_core(encoder, max_num_seqs=1, max_num_batched_tokens=4)
    core.add(request("late", [1], priority=1))
    core.add(request("gone", [2]))
    core.add(request("first", [3], priority=-1))
    core.abort("gone")
    core.abort("unknown")
    assert [o.request_id for _ in range(3) for o in core.step()] == ["first", "late"]


def test_a_failing_batch_does_not_affect_others(encoder):
    core = make_core(encoder, max_num_seqs=2, max_num_batched_tokens=4)
    for name, ids in (("a", [99]), ("b", [1]), ("c", [2, 4])):
        core.add(request(name, ids))
    failed, answered = core.step(), core.step()
    assert [o.finish_reason for o in failed] == [FinishReason.ERROR] * 2
    assert "broken" in failed[0].error
    assert vectors(answered) == {"c": [3.0]}
    assert not core.lost_device


def test_a_batch_that_fails_with_its_device_is_reported(encoder):
    core = make_core(encoder)
    encoder.lost = True
    core.add(request("a", [1]))
    assert vectors(core.step()) == {"a": [1.0]} and not core.lost_device
    core.add(request("b", [99]))
    assert "broken" in core.step()[0].error and core.lost_device


def test_requests_rejected_on_submission(encoder):
    core = make_core(encoder, max_queue_size=1)
    assert "cannot generate" in core.add(request("a", [1], pooling=None))[0].error
    assert core.add(request("a", [1])) == []
    assert "in use" in core.add(request("a", [1]))[0].error
    (full,) = core.add(request("b", [1]))
    assert full.refused and "max_queue_size" in full.error
    core.check_integrity()
    assert core.stats().num_waiting == 1
