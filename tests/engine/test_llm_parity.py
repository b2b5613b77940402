"""Greedy float32 tokens equal those of transformers' generate for any schedule."""

from __future__ import annotations

import random

import pytest
from oracle import greedy

from neso.engine.client.llm import LLM
from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.load.loader import load_engine
from neso.generation import SamplingParams

MAX_TOKENS = 24
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
CHECKPOINTS = {
    "llama": ("llama", {}),
    "llama-tied-bf16": ("llama", {"tie_word_embeddings": True, "dtype": "bfloat16"}),
    "llama-sharded-fp16": ("llama", {"dtype": "float16", "max_shard_size": "60KB"}),
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    **{
        f"llama-{kind}": ("llama", {"rope_parameters": {"rope_theta": 10000.0, **parameters}})
        for kind, parameters in ROPES.items()
    },
}
# Prefill is not paced: preemption must not depend on the duration of steps.
TINY = {"num_blocks": 24, "block_size": 4, "max_decode_stretch": 0}
SCHEDULES = {
    "plain": {},
    "chunk-1": {"max_prefill_chunk": 1},
    "chunk-7": {"max_prefill_chunk": 7},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "tiny-cache": TINY,
    "tiny-cache-chunk-7": {**TINY, "max_prefill_chunk": 7},
    "one-at-a-time": {"max_num_seqs": 1},
    "no-overlap": {"enable_overlap": False},
    "tiny-cache-no-evict": {**TINY, "batch_scheduler_policy": "guaranteed_no_evict"},
    "static": {"gpt_model_type": "V1", "max_num_seqs": 3},
}


def make_prompts() -> list[list[int]]:
    """Return prompts of 1 to 60 tokens; some share a prefix."""
    rng = random.Random(3)
    shared = [rng.randrange(6, 300) for _ in range(33)]
    prompts = [[rng.randrange(6, 300) for _ in range(n)] for n in (1, 5, 16, 17, 60)]
    return [*prompts, [*shared, 7], [*shared, 8, 9]]


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=str)
def model(request, checkpoint_factory):
    arch, overrides = CHECKPOINTS[request.param]
    directory = checkpoint_factory(arch, **overrides)
    return directory, greedy(directory, make_prompts(), MAX_TOKENS)


@pytest.mark.pairwise
@pytest.mark.parametrize("runner", ["reference", "native", "torch"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_tokens_equal_transformers(model, schedule, runner):
    """Requests join while others run and end at different steps."""
    directory, expected = model
    options = {"runner": runner, "dtype": "float32", **SCHEDULES[schedule]}
    config = EngineConfig.from_options(str(directory), options)
    core, _ = load_engine(config)
    rng = random.Random(schedule)
    lengths = [rng.choice([MAX_TOKENS, MAX_TOKENS // 2]) for _ in expected]
    arriving = [
        EngineRequest(
            request_id=str(i),
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0),
            max_tokens=length,
        )
        for i, (prompt, length) in enumerate(zip(make_prompts(), lengths, strict=True))
    ]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in arriving}
    while arriving or core.has_work:
        if arriving and rng.random() < 0.5:
            assert core.add(arriving.pop(0)) == []
        for output in core.step():
            assert not output.error
            tokens[output.request_id] += output.token_ids
        core.check_integrity()
    assert tokens == {
        str(i): ids[:length] for i, (ids, length) in enumerate(zip(expected, lengths, strict=True))
    }
    assert core.scheduler.kv.pool.num_used == 0
    if "no-evict" in schedule:
        assert core.scheduler.num_preemptions == 0
    elif "tiny" in schedule and core.runner.window is None:
        assert core.scheduler.num_preemptions > 0, "the cache is too large for this test"


def test_dynamic_rope_beyond_the_original_length(checkpoint_factory):
    """Within the original length dynamic scaling has no effect, so results are exact for any batch."""
    directory = checkpoint_factory(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    )
    prompts = make_prompts()
    llm = LLM(directory, runner="reference")
    results = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), progress=False
    )
    assert [r.outputs[0].token_ids for r in results] == greedy(directory, prompts, 8)
