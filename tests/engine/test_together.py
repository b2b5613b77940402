"""Combinations of features: requests of all kinds in one small engine give the results that each gives alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint, make_llava
from request_mix import METHODS, REGEX, WINDOW, AnyRequest, Files, Mixed, with_prompt

from neso.engine.client.llm import LLM
from neso.generation import DraftTokens, InvalidParameter, LoraRequest, SamplingParams

TINY = {"num_blocks": 36, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
SCHEDULES: dict[str, dict[str, Any]] = {
    "preempted": {**TINY, "max_prefill_chunk": 7},
    "no prefix cache": {**TINY, "max_prefill_chunk": 5, "enable_prefix_caching": False},
    "one by one": {**TINY, "num_blocks": 48, "max_prefill_chunk": 1},
    "no evict": {**TINY, "num_blocks": 60, "batch_scheduler_policy": "guaranteed_no_evict"},
    "static": {**TINY, "gpt_model_type": "static", "max_prefill_chunk": 9},
    "priorities": {**TINY, "priority_ageing_seconds": 0, "max_prefill_chunk": 16},
}


@pytest.fixture(scope="module")
def files(checkpoint_factory, tmp_path_factory) -> Files:
    other = checkpoint_factory("llama", seed=7, num_hidden_layers=1, hidden_size=32, num_attention_heads=2)
    return Files(tmp_path_factory.mktemp("together"), checkpoint_factory("llama"), other)


def run_mixed(engine: Mixed, requests: dict[str, AnyRequest], rng: random.Random) -> set[str]:
    """Add all requests at random steps and abort some; return the names of the completed ones."""
    arriving = list(requests)
    rng.shuffle(arriving)
    doomed = {name for name in arriving if rng.random() < 0.2}
    aborted: set[str] = set()
    for _ in range(20_000):
        if not arriving and not engine.busy:
            break
        while arriving and rng.random() < 0.4:
            engine.add(arriving[-1], requests[arriving[-1]])
            arriving.pop()
        for name in sorted(doomed & engine.running):
            if rng.random() < 0.1:
                engine.abort(name)
                aborted.add(name)
        engine.step()
    else:
        raise AssertionError("the engine does not come to an end")
    engine.assert_empty()
    return set(requests) - aborted


def check(
    files: Files, runner: str, seed: int, names: list[str], *parts: dict[str, Any], windowed: bool = False
) -> Mixed:
    rng = random.Random(seed)
    requests = files.catalogue(runner, windowed)
    engine = files.open(runner, *parts, WINDOW if windowed else {})
    answered = run_mixed(engine, {name: requests[name] for name in names}, rng)
    for name in names:
        found, expected = engine.answers[name], files.alone(name, runner, windowed)
        if name in answered:
            found.assert_equal(expected, name)
        else:
            assert found.begins(expected), name
    if SCHEDULES["no evict"] in parts:
        assert engine.core.scheduler.num_preemptions == 0
    return engine


def grid(schedules: list[str], fast: str) -> list[Any]:
    """Return all methods in all schedules; the quick cases cover each method and each schedule at least once."""
    pairs = [(method, schedule) for method in METHODS for schedule in schedules]
    quick = {(method, fast) for method in METHODS} | {("ngram", schedule) for schedule in schedules}
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("method", "schedule"), grid(list(SCHEDULES), "preempted"))
def test_results_equal_those_of_single_requests(files, method, schedule):
    engine = check(files, "native", 1, list(files.catalogue()), METHODS[method], SCHEDULES[schedule])
    if schedule == "preempted":
        assert engine.core.scheduler.num_preemptions > 0
    assert engine.core.stats().drafts.accepted_tokens > 0, "requests bring drafts of their own"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 104))
def test_other_schedules(files, seed):
    rng = random.Random(seed)
    for windowed in (False, True):
        names = sorted(files.catalogue(windowed=windowed))
        for method in METHODS.values():
            schedule = rng.choice(list(SCHEDULES.values()))
            check(files, "native", seed, rng.sample(names, 60), method, schedule, windowed=windowed)


@pytest.mark.parametrize("runner", ["reference", "torch"])
@pytest.mark.parametrize("method", METHODS)
def test_other_runners(files, method, runner):
    names = random.Random(method).sample(sorted(files.catalogue(runner)), 18)
    check(files, runner, 2, names, METHODS[method], SCHEDULES["preempted"])


@pytest.mark.parametrize(
    ("method", "schedule"), grid(["preempted", "no evict", "one by one", "no prefix cache"], "preempted")
)
def test_windows_and_sinks(files, method, schedule):
    names = random.Random(method).sample(sorted(files.catalogue(windowed=True)), 70)
    check(files, "native", 3, names, METHODS[method], SCHEDULES[schedule], windowed=True)


@pytest.mark.parametrize("method", ["plain", "draft model"])
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_on_the_host(files, method, overlap):
    """With torch and adapters: offloaded blocks are reloaded for the adapter that computed them."""
    names = [
        name for name in sorted(files.catalogue("torch")) if name.startswith(("prompt", "greedy", "draft"))
    ]
    host = {"kv_cache_host_memory_bytes": 200 * 3 * 2 * 2 * 12 * 4 * 4, "enable_overlap": overlap}
    engine = check(files, "torch", 4, names, METHODS[method], SCHEDULES["preempted"], host)
    assert engine.core.scheduler.kv.prefix_cache.host.stats.loaded_blocks > 0


@pytest.mark.parametrize(
    "options", [METHODS["ngram"], {"speculative_model": "text"}], ids=["ngram", "draft model"]
)
def test_images_with_speculative_decoding(tmp_path, options):
    llava = make_llava(tmp_path / "llava")
    text = make_checkpoint(tmp_path / "text")
    if "speculative_model" in options:
        options = {"speculative_model": str(text), "draft_sample_method": "greedy"}
    image = np.random.default_rng(0).integers(0, 256, (28, 28, 3), np.uint8)
    prompts = [{"prompt": f"{i} <image> and again and again and", "images": [image]} for i in range(4)]
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, **fields)
        for fields in (
            {"temperature": 0},
            {"temperature": 0, "beam_width": 2, "n": 2},
            {"temperature": 0.8, "seed": 1, "best_of": 3, "frequency_penalty": 0.5},
            {"temperature": 0.8, "seed": 2, "n": 2, "logprobs": 1, "no_repeat_ngram_size": 2},
        )
    ]

    def answers(**more: Any) -> list[list[list[int]]]:
        llm = LLM(llava, runner="native", dtype="float32", adaptive_speculation=False, **more)
        results = llm.generate(prompts, params, progress=False)
        llm.core.check_integrity()
        assert llm.core.scheduler.kv.pool.num_used == 0
        assert (llm.core.stats().drafts.drafts > 0) == bool("max_num_seqs" in more)
        return [[output.token_ids for output in result.outputs] for result in results]

    assert answers(**TINY, max_prefill_chunk=9, **options) == answers()


@pytest.mark.parametrize(
    ("fields", "options", "field"),
    [
        ({"beam_width": 2, "guided_decoding": REGEX}, {}, "beam_width"),
        ({"beam_width": 2, "best_of": 2}, {}, "best_of"),
        ({"best_of": 2}, {"draft": DraftTokens([9])}, "draft_input_ids"),
        ({"beam_width": 2}, {"draft": DraftTokens([9])}, "draft_input_ids"),
        ({"n": 9}, {}, "n"),
        ({"best_of": 9}, {}, "best_of"),
        ({"prompt_logprobs": 1}, {"vectors": True}, "prompt_logprobs"),
        ({}, {"lora": LoraRequest(name="unknown")}, "LoRA unknown"),
        ({}, {"images": (np.zeros((4, 4, 3), np.uint8),)}, "images"),
    ],
)
def test_incompatible_parameters_are_rejected(files, fields, options, field):
    engine = files.open("native", SCHEDULES["preempted"])
    with pytest.raises((InvalidParameter, AssertionError), match=field):
        requested = with_prompt("vectors" if options.pop("vectors", False) else "short", fields, **options)
        engine.add("refused", requested)
