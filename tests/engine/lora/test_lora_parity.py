"""Tokens with adapters equal peft for any schedule and batch composition."""

from __future__ import annotations

import random

import pytest
from peft_adapters import greedy_with, write_adapter

from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.load.loader import load_engine
from neso.engine.lora.adapter import LoraPlan
from neso.generation import LoraRequest, SamplingParams

MAX_TOKENS = 16
ADAPTERS = {
    "all": {},
    "attention": {"r": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "rank_pattern": {"down_proj": 9, r"layers\.1\.self_attn\.q_proj": 2},
        "alpha_pattern": {"up_proj": 3},
        "target_modules": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"],
    },
    "wide": {"r": 33, "lora_alpha": 16, "layers_to_transform": [0, 2]},
}
SCHEDULES = {
    "plain": {},
    "chunk-7": {"max_prefill_chunk": 7},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "tiny-cache": {"num_blocks": 24, "block_size": 4, "max_prefill_chunk": 7},
    "one-slot": {"max_loras": 1},
    "two-slots": {"max_loras": 2, "max_num_seqs": 3},
    "no-overlap": {"enable_overlap": False},
}


def make_prompts() -> list[list[int]]:
    """Return prompts that all adapters share: cached blocks of one adapter must not be used for another."""
    rng = random.Random(3)
    shared = [rng.randrange(6, 300) for _ in range(33)]
    prompts = [[rng.randrange(6, 300) for _ in range(n)] for n in (1, 17, 45)]
    return [*prompts, [*shared, 7], [*shared, 8, 9]]


@pytest.fixture(scope="module", params=["llama", "qwen2", "llama-biases"])
def model(request, checkpoint_factory, tmp_path_factory):
    """Return a checkpoint, its adapters, and peft's tokens by adapter."""
    overrides = {"attention_bias": True, "mlp_bias": True} if request.param == "llama-biases" else {}
    base = checkpoint_factory(request.param.partition("-")[0], **overrides)
    root = tmp_path_factory.mktemp("adapters")
    paths = {
        name: write_adapter(base, root / name, seed=seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }
    expected = {name: greedy_with(base, path, make_prompts(), MAX_TOKENS) for name, path in paths.items()}
    expected[""] = greedy_with(base, None, make_prompts(), MAX_TOKENS)
    flat = [str(tokens) for tokens in expected.values()]
    assert len(set(flat)) == len(flat), "the adapters change nothing: this test cannot fail"
    return base, paths, expected


@pytest.mark.pairwise
@pytest.mark.parametrize("runner", ["reference", "native", "torch"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_tokens_equal_peft(model, schedule, runner):
    """Requests with four adapters and with none join and leave at different steps."""
    base, paths, expected = model
    modules = {name: str(path) for name, path in paths.items()}
    options = {"runner": runner, "dtype": "float32", "lora_modules": modules, **SCHEDULES[schedule]}
    core, _ = load_engine(EngineConfig.from_options(str(base), options))
    rng = random.Random(schedule)
    arriving = [
        EngineRequest(
            request_id=f"{name}/{i}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0),
            max_tokens=rng.choice([MAX_TOKENS, MAX_TOKENS // 2]),
            lora=LoraRequest(name=name) if name else None,
        )
        for name in expected
        for i, prompt in enumerate(make_prompts())
    ]
    rng.shuffle(arriving)
    lengths = {request.request_id: request.max_tokens for request in arriving}
    tokens: dict[str, list[int]] = {request.request_id: [] for request in arriving}
    mixed = 0
    while arriving or core.has_work:
        if arriving and rng.random() < 0.7:
            assert core.add(arriving.pop(0)) == []
        for output in core.step():
            assert not output.error, output.error
            tokens[output.request_id] += output.token_ids
        core.check_integrity()
        lora = None if core.last_plan is None else core.last_plan.part(LoraPlan)
        mixed += lora is not None and len(set(lora.slots.tolist())) > 2
    assert tokens == {
        f"{name}/{i}": ids[: lengths[f"{name}/{i}"]]
        for name, results in expected.items()
        for i, ids in enumerate(results)
    }
    assert mixed or schedule == "one-slot", "no batch had several adapters"
    assert core.scheduler.kv.pool.num_used == 0
    if schedule == "tiny-cache":
        assert core.scheduler.num_preemptions > 0, "the cache is too large for this test"


def test_merged_peft_weights_give_the_same_tokens(model):
    base, paths, expected = model
    for name in ("all", "patterns"):
        assert greedy_with(base, paths[name], make_prompts(), MAX_TOKENS, merged=True) == expected[name]
