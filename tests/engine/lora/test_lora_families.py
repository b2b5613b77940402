"""Adapters for families other than Llama: fused, transposed and interleaved matrices, plain MLPs, parallel branches."""

from __future__ import annotations

import pytest
from peft_adapters import greedy_with, write_adapter

from neso.engine.client.llm import LLM
from neso.engine.errors import EngineError
from neso.generation import SamplingParams

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
PROMPTS = [[7, 8, 9], [*range(20, 60)], [100]]

ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
FAMILIES = {
    "phi3": {"target_modules": "all-linear"},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "gpt_neox": {"target_modules": "all-linear"},
    "opt": {"target_modules": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]},
    "gemma3_text": {"target_modules": "all-linear"},
    "cohere2": {"target_modules": "all-linear"},
    "stablelm": {"target_modules": "all-linear"},
    "mixtral": ATTENTION,
    "qwen2_moe": ATTENTION,
}
# OPT-350m's layers and projections.
OVERRIDES = {"opt": {"do_layer_norm_before": False, "word_embed_proj_dim": 32}}


@pytest.mark.parametrize("arch", FAMILIES)
def test_tokens_equal_peft(checkpoint_factory, tmp_path, arch):
    base = checkpoint_factory(arch, **OVERRIDES.get(arch, {}))
    adapter = write_adapter(base, tmp_path / "adapter", seed=1, r=5, **FAMILIES[arch])
    expected = [
        *greedy_with(base, None, PROMPTS, MAX_TOKENS),
        *greedy_with(base, adapter, PROMPTS, MAX_TOKENS),
    ]
    assert expected[:3] != expected[3:]
    for runner in ("reference", "native", "torch"):
        llm = LLM(
            base,
            runner=runner,
            dtype="float32",
            lora_modules={"a": str(adapter)},
            max_prefill_chunk=7,
            block_size=4,
            num_blocks=48,
        )
        results = llm.generate(PROMPTS * 2, GREEDY, lora=[None] * 3 + ["a"] * 3, progress=False)
        assert [r.outputs[0].token_ids for r in results] == expected, runner


def test_projections_of_the_embedding_are_not_adapted(checkpoint_factory, tmp_path):
    base = checkpoint_factory("opt", **OVERRIDES["opt"])
    adapter = write_adapter(base, tmp_path / "adapter", seed=1, target_modules=["project_in"])
    llm = LLM(base, runner="reference", enable_lora=True)
    with pytest.raises(EngineError, match="project_in, which is no linear layer of this model that can be"):
        llm.load_lora("a", adapter)


def test_experts_are_not_adapted(checkpoint_factory, tmp_path):
    base = checkpoint_factory("qwen2_moe")
    adapter = write_adapter(base, tmp_path / "adapter", seed=1, target_modules=["up_proj"])
    llm = LLM(base, runner="reference", enable_lora=True)
    with pytest.raises(EngineError, match="which is no linear layer of this model that can be adapted"):
        llm.load_lora("a", adapter)
