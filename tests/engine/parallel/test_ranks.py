"""Engines of two ranks, each a process: same results as one rank for requests of every kind, mixed in small batches."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_encoder
from request_mix import METHODS, Answer, AnyRequest, Files
from require_mpi import requires_mpi

from neso.engine.client.async_engine import AsyncEngine
from neso.engine.client.engine_client import Output
from neso.engine.client.llm import LLM
from neso.engine.client.output_processor import PooledState, RequestState
from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.generation import GenerationRequest, PooledOutput, PoolingRequest, SamplingParams

pytestmark = requires_mpi

TINY = {"num_blocks": 36, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "tensor, n-grams, preempted": {**TENSOR, **TINY, "max_prefill_chunk": 7, **METHODS["ngram"]},
    "tensor, Medusa, priorities": {**TENSOR, **TINY, "priority_ageing_seconds": 0, **METHODS["medusa"]},
    "pipeline, draft model, no prefix cache": {
        **PIPELINE,
        **TINY,
        "max_prefill_chunk": 5,
        "enable_prefix_caching": False,
        **METHODS["draft model"],
    },
    "pipeline, one token per chunk": {**PIPELINE, **TINY, "max_prefill_chunk": 1},
}
QUICK = ("tensor, n-grams, preempted", "pipeline, draft model, no prefix cache")


@pytest.fixture(scope="module")
def files(checkpoint_factory, tmp_path_factory) -> Files:
    other = checkpoint_factory("llama", seed=7, num_hidden_layers=1, hidden_size=32, num_attention_heads=2)
    return Files(tmp_path_factory.mktemp("ranks"), checkpoint_factory("llama"), other)


async def answer_all(engine: AsyncEngine, files: Files, requests: dict[str, AnyRequest]) -> dict[str, Answer]:
    """Send all requests at once; returns their results."""
    mixed = files.open("native", num_blocks=64)  # only for the conversion of requests
    answers = {name: Answer() for name in requests}
    open_requests = set(requests)
    done = asyncio.Event()

    def send(name: str) -> None:
        request = mixed.engine_request(name, requests[name])
        is_pooling = isinstance(requests[name], PoolingRequest)
        state = PooledState(request) if is_pooling else RequestState(request, mixed.tokenizer)

        def deliver(output: Output | Exception) -> None:
            if isinstance(output, Exception):
                answers[name].error = str(output)
            else:
                answers[name].take(output)
            if isinstance(output, Exception | PooledOutput) or output.finished:
                open_requests.discard(name)
                if not open_requests:
                    done.set()

        engine.submit(state, deliver)

    for name in requests:
        send(name)
    await done.wait()
    return answers


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
async def test_results_equal_those_of_one_rank(files, case):
    options = files.engine_options(CASES[case])
    requests = files.catalogue()
    names = list(requests)
    random.Random(1).shuffle(names)
    engine = await AsyncEngine.start(EngineConfig.from_options(str(files.same), options))
    try:
        answers = await answer_all(engine, files, {name: requests[name] for name in names})
        stats = await engine.check_integrity()
    finally:
        await engine.stop()
    for name in names:
        answers[name].assert_equal(files.alone(name, "native", False), name)
    assert (stats.num_running, stats.num_used_blocks) == (0, 0)
    if "preempted" in case:
        assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    if "draft" in case or "n-grams" in case:
        assert stats.drafts.accepted_tokens > 0


async def test_ranks_give_the_same_tokens_in_every_run(files):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, logprobs=1)
    request = GenerationRequest("The quick", params)
    found = []
    for _ in range(2):
        engine = await AsyncEngine.start(
            EngineConfig.from_options(str(files.same), {**TENSOR, "num_blocks": 64})
        )
        try:
            outputs = [output async for output in engine.generate(request)]
        finally:
            await engine.stop()
        deltas = [delta for output in outputs for delta in output.deltas]
        found.append([(delta.token_ids, delta.logprobs) for delta in deltas])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.1), ("int4", 0.1), ("int8_dynamic", 0.5)])
async def test_quantized_weights(checkpoint_factory, quantization, error):
    """Cuts are between groups of 32 inputs, so with `int8` and `int4` the ranks have the weights of one rank.

    Groups of `int8_dynamic` begin anew at the cuts, and activations are rounded to 8 bits.
    """
    model = checkpoint_factory("llama", hidden_size=128, intermediate_size=256)
    options = {"dtype": "bfloat16", "quantization": quantization, "num_blocks": 64}
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompt = "A server answers requests, and a client waits"
    [expected] = LLM(model, **options).generate(prompt, params, progress=False)
    engine = await AsyncEngine.start(EngineConfig.from_options(str(model), {**options, **TENSOR}))
    try:
        found = [output async for output in engine.generate(GenerationRequest(prompt, params))]
    finally:
        await engine.stop()
    ours = [entry.logprob for entry in found[0].prompt_logprobs if entry is not None]
    theirs = [entry.logprob for entry in expected.prompt_logprobs if entry is not None]
    assert ours == pytest.approx(theirs, abs=error)


async def test_rank_that_cannot_load_is_a_start_error(checkpoint_factory):
    config = EngineConfig.from_options(str(checkpoint_factory("llama")), {"tensor_parallel_size": 5})
    with pytest.raises(
        EngineError, match="tensor_parallel_size 5 is larger than the number of attention heads"
    ):
        await AsyncEngine.start(config)


def test_llm_in_this_process_refuses_ranks(files):
    with pytest.raises(EngineError, match="need `neso serve`"):
        LLM(files.same, tensor_parallel_size=2)


async def test_embedding_models_refuse_ranks(tmp_path: Path):
    config = EngineConfig.from_options(str(make_encoder(tmp_path / "encoder")), TENSOR)
    with pytest.raises(EngineError, match="embedding models run on one rank"):
        await AsyncEngine.start(config)
