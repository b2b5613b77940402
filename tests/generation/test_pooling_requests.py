"""Scores from vectors, concurrent pooling requests, images in messages."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from neso.generation import InvalidParameter, PooledOutput, PoolingInfo, PoolingRequest
from neso.generation.pooling import MAX_TASKS_PER_TURN, Scoring, pool_all
from neso.generation.request import split_images

EMBEDDER = PoolingInfo(tasks=frozenset({"embed"}), dimensions=2, kind="mean")
RERANKER = PoolingInfo(tasks=frozenset({"embed", "classify"}), dimensions=2, kind="cls", labels=["LABEL_0"])


def output(*values: float) -> PooledOutput:
    return PooledOutput("", np.array(values, np.float32), 1)


def test_each_text_is_embedded_once():
    scoring = Scoring.of(EMBEDDER, "a", ["b", "a", "b"])
    assert scoring.prompts == ["a", "b"] and scoring.params.normalize
    np.testing.assert_allclose(scoring.scores([output(1, 0), output(0.6, 0.8)]), [0.6, 1, 0.6])


def test_cross_encoder_reads_pairs():
    scoring = Scoring.of(RERANKER, ["a", "b"], ["c", "d"], activation=False)
    assert scoring.prompts == [("a", "c"), ("b", "d")] and not scoring.params.activation
    np.testing.assert_allclose(scoring.scores([output(3), output(-1)]), [3, -1])


def test_unpaired_texts_are_rejected():
    with pytest.raises(InvalidParameter, match="2 queries and 3 documents"):
        Scoring.of(EMBEDDER, ["a", "b"], ["c", "d", "e"])


async def test_results_keep_the_order_of_requests():
    async def pool(request: PoolingRequest) -> PooledOutput:
        await asyncio.sleep(0.001 * (request.prompt[0] % 3))
        return output(request.prompt[0])

    count = 2 * MAX_TASKS_PER_TURN + 3
    pooled = await pool_all(pool, [PoolingRequest([i]) for i in range(count)])
    assert [o.values[0] for o in pooled] == list(range(count))


async def test_a_failure_cancels_the_other_requests():
    cancelled = []

    async def pool(request: PoolingRequest) -> PooledOutput:
        if request.prompt == [1]:
            raise InvalidParameter("prompt", "is bad")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(request.prompt)
            raise
        return output(0)

    with pytest.raises(InvalidParameter, match="is bad"):
        await pool_all(pool, [PoolingRequest([i]) for i in range(3)])
    assert cancelled == [[0], [2]]


def test_images_are_separated_from_messages():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:one"}},
        {"type": "image", "image": b"two"},
    ]
    given = [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]
    messages, images = split_images(given)
    assert images == ("data:one", b"two")
    assert messages[0] is given[0]
    assert messages[1]["content"] == [parts[0], {"type": "image"}, {"type": "image"}]
    assert parts[1]["image_url"]["url"] == "data:one", "what was given is not changed"
    with pytest.raises(InvalidParameter, match="no image"):
        split_images([{"role": "user", "content": [{"type": "image_url"}]}])
