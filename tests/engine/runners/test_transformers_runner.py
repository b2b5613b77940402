"""Models without a spec, run by transformers with Neso's paged attention, compared with transformers' generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import SHAPE, load_oracle, randomize, rewrite_config, write_tokenizer
from oracle import greedy
from plan_builder import PlanBuilder, oracle_logits, random_tokens, run, run_in_chunks
from transformers import AutoConfig, AutoModelForCausalLM

from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.errors import EngineError
from neso.engine.load.loader import load_engine
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.runners.transformers_runner import TransformersRunner
from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.weights.checkpoint import Checkpoint
from neso.generation import SamplingParams

# Families and their differences from Llama. All but Nemotron and CTRL have specs, which are not used here.
FAMILIES: dict[str, dict[str, Any]] = {
    "stablelm": {"partial_rotary_factor": 0.5},  # LayerNorm with bias, partial rotation
    "olmo2": {},  # norms after attention and MLP
    "cohere": {"logit_scale": 0.5},  # parallel attention and MLP
    "gpt_bigcode": {"n_positions": 512, "n_embd": 48, "n_layer": 3, "n_head": 4, "multi_query": True},
    "nemotron": {},  # no spec: LayerNorm with weights from 1, squared ReLU
    "starcoder2": {"sliding_window": 9},  # biases, a window
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 16,
    },  # soft caps, windows by layer
    "ctrl": {
        "n_positions": 512,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "dff": 96,
    },  # ends with "LMHeadModel"
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # experts
}


def make_model(directory: Path, arch: str, **overrides: Any) -> Path:
    fields = {**SHAPE, **FAMILIES.get(arch, {}), **overrides}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **fields))
    randomize(model)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


def open_runner(directory: Path) -> TransformersRunner:
    with Checkpoint(directory) as checkpoint:
        return TransformersRunner.open(checkpoint, RunnerOptions(dtype="float32"))


def test_logits_equal_transformers_for_any_split_into_steps(directory: Path) -> None:
    runner, tokens = open_runner(directory), random_tokens(45)
    expected = oracle_logits(load_oracle(directory), tokens)
    builder = PlanBuilder()
    runner.allocate_cache(builder.layout)
    for sizes in ([45], [7, 1, 1, 30, 6]):
        np.testing.assert_allclose(run_in_chunks(runner, builder, tokens, sizes), expected, atol=5e-4)
    first, second = builder.sequence(tokens), builder.sequence(tokens[:20])
    run(runner, builder.plan([(first, 30), (second, 19)], rows=[]))
    mixed = run(runner, builder.plan([(second, 1), (first, 15)], rows=[15, 0]))
    np.testing.assert_allclose(mixed, expected[[44, 19]], atol=5e-4)


def test_engine_tokens_equal_transformers(directory: Path) -> None:
    """Concurrent requests in chunks, with a cache too small for all of them."""
    prompts = [random_tokens(length, seed=length) for length in (1, 5, 17, 40)]
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 24, "block_size": 4, "max_prefill_chunk": 7}
    options |= {"runner": "transformers"}
    core, info = load_engine(EngineConfig.from_options(str(directory), options))
    assert info.runner == "TransformersRunner"
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, ignore_eos=True)
        request = EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling, max_tokens=16)
        assert core.add(request) == []
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while core.has_work:
        for output in core.step():
            assert not output.error
            tokens[output.request_id] += output.token_ids
    assert list(tokens.values()) == greedy(directory, prompts, 16)
    assert core.scheduler.num_preemptions > 0


def test_auto_selects_it_for_a_model_without_a_spec(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "nemotron")
    _, info = load_engine(EngineConfig.from_options(str(directory), {"num_blocks": 8}))
    assert info.runner == "TransformersRunner"


def test_models_with_other_state_than_keys_and_values_are_rejected(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "mamba", state_size=4)
    rewrite_config(directory, max_position_embeddings=512)
    with pytest.raises(EngineError, match="linear_attention"):
        load_engine(EngineConfig.from_options(str(directory), {}))


def test_rotary_frequencies_that_depend_on_the_batch_are_rejected(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    directory = make_model(tmp_path, "olmo2", rope_parameters=scaling)
    with Checkpoint(directory) as checkpoint, pytest.raises(UnsupportedModel, match="dynamic"):
        TransformersRunner.open(checkpoint)


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("phimoe", {"sliding_window": 9}),
        ("qwen2_moe", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}),
    ],
)
def test_windows_that_only_the_mask_applies_are_rejected(
    tmp_path: Path, arch: str, overrides: dict[str, Any]
) -> None:
    directory = make_model(tmp_path, arch, num_experts=4, num_local_experts=4, **overrides)
    with Checkpoint(directory) as checkpoint, pytest.raises(UnsupportedModel, match="window of 9 tokens"):
        TransformersRunner.open(checkpoint)


@pytest.mark.parametrize("arch", ["falcon", "gptj"])
def test_attention_classes_of_their_own_are_named_in_the_error(tmp_path: Path, arch: str) -> None:
    overrides = {"n_positions": 512, "n_embd": 48, "n_layer": 3, "n_head": 4, "rotary_dim": 4}
    directory = make_model(tmp_path, arch, **overrides)
    with pytest.raises(EngineError, match=rf"{arch}: .* attention classes of its own"):
        load_engine(EngineConfig.from_options(str(directory), {}))


def test_quantization_is_rejected(directory: Path) -> None:
    with Checkpoint(directory) as checkpoint, pytest.raises(UnsupportedOption, match="quantized"):
        TransformersRunner.open(checkpoint, RunnerOptions(quantization="fp8"))


def test_an_architecture_unknown_to_transformers(tmp_path: Path, llama_checkpoint: Path) -> None:
    import shutil

    directory = shutil.copytree(llama_checkpoint, tmp_path / "unknown")
    rewrite_config(directory, architectures=["UnheardOfForCausalLM"], model_type="unheard_of")
    with pytest.raises(EngineError, match="unheard_of"):
        load_engine(EngineConfig.from_options(str(directory), {}))
