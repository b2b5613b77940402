"""Invalid adapters are rejected with a reason and fail only their own requests."""

from __future__ import annotations

import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from peft_adapters import write_adapter
from safetensors.numpy import load_file, save_file

from neso.engine.client.llm import LLM
from neso.engine.errors import EngineError
from neso.generation import InvalidParameter, LoraRequest, LoraTensors, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [[7, 8, 9, 10]]


@pytest.fixture(scope="module")
def llm(llama_checkpoint):
    return LLM(llama_checkpoint, runner="reference", enable_lora=True, max_lora_rank=16)


def edit_config(directory, **fields):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_tensors(directory, change):
    path = directory / "adapter_model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)


def q_proj(side):
    return f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight"


def drop_b(tensors):
    del tensors[q_proj("B")]


def flatten_a(tensors):
    tensors[q_proj("A")] = tensors[q_proj("A")].reshape(-1)


def narrow_b(tensors):
    tensors[q_proj("B")] = np.ascontiguousarray(tensors[q_proj("B")][:-1])


def integers(tensors):
    tensors[q_proj("A")] = tensors[q_proj("A")].astype(np.int8)


def add_magnitude(tensors):
    tensors[q_proj("A").replace("lora_A.weight", "lora_magnitude_vector")] = np.ones(4, np.float32)


def add_embedding(tensors):
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = np.ones((4, 384), np.float32)


def add_layer(tensors):
    for side in "AB":
        tensors[q_proj(side).replace("layers.0", "layers.9")] = tensors[q_proj(side)]


def add_head(tensors):
    tensors["base_model.model.lm_head.lora_A.weight"] = np.ones((4, 48), np.float32)
    tensors["base_model.model.lm_head.lora_B.weight"] = np.ones((384, 4), np.float32)


BROKEN = {
    "DoRA": (lambda d: edit_config(d, use_dora=True), "DoRA is not supported"),
    "modules_to_save": (lambda d: edit_config(d, modules_to_save=["lm_head"]), "modules_to_save"),
    "bias": (lambda d: edit_config(d, bias="all"), "bias is 'all'"),
    "another method": (lambda d: edit_config(d, peft_type="LOHA"), "only LORA"),
    "no rank": (lambda d: edit_config(d, r=None), "lora_alpha"),
    "no expression": (lambda d: edit_config(d, rank_pattern={"(": 3}), "no regular expression"),
    "another rank": (lambda d: edit_config(d, r=8), "has the rank 4, adapter_config.json says 8"),
    "no config": (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json: cannot be read"),
    "config is no JSON": (lambda d: (d / "adapter_config.json").write_text("{"), "invalid JSON"),
    "no weights": (
        lambda d: (d / "adapter_model.safetensors").unlink(),
        "there is no adapter_model.safetensors",
    ),
    "half a pair": (lambda d: edit_tensors(d, drop_b), "only one of lora_A and lora_B"),
    "flat": (lambda d: edit_tensors(d, flatten_a), "no float matrix"),
    "integers": (lambda d: edit_tensors(d, integers), "no float matrix"),
    "narrow": (lambda d: edit_tensors(d, narrow_b), "is the adapter for another model"),
    "magnitudes": (lambda d: edit_tensors(d, add_magnitude), "no part of a low-rank change"),
    "embedding": (lambda d: edit_tensors(d, add_embedding), "no part of a low-rank change"),
    "layer too many": (lambda d: edit_tensors(d, add_layer), r"changes model\.layers\.9\.self_attn\.q_proj"),
    "lm_head": (lambda d: edit_tensors(d, add_head), "changes lm_head"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_invalid_adapters_fail_only_their_request(llm, adapters, copy_of, name):
    directory = copy_of(adapters[0])
    breaks, message = BROKEN[name]
    breaks(directory)
    healthy = llm.stream(PROMPT[0], GREEDY)
    next(healthy)
    with pytest.raises(InvalidParameter, match=message) as caught:
        llm.generate(PROMPT, GREEDY, lora=LoraRequest(name="broken", path=str(directory)), progress=False)
    assert caught.value.field == "lora_name"
    assert sum(len(delta.token_ids) for output in healthy for delta in output.deltas) == 7
    assert "broken" not in llm.list_loras(), "what failed is not listed"
    llm.core.check_integrity()


def test_truncated_files(llm, adapters, copy_of):
    weights = (adapters[0] / "adapter_model.safetensors").read_bytes()
    for size in (0, 5, 100, len(weights) // 2, len(weights) - 1):
        directory = copy_of(adapters[0])
        (directory / "adapter_model.safetensors").write_bytes(weights[:size])
        with pytest.raises(EngineError, match="adapter 'cut'"):
            llm.load_lora("cut", directory)


def test_adapters_for_another_model(llm, checkpoint_factory, tmp_path):
    wider = checkpoint_factory("llama", hidden_size=64)
    adapter = write_adapter(wider, tmp_path / "wider", seed=0)
    with pytest.raises(EngineError, match="is the adapter for another model"):
        llm.load_lora("wider", adapter)


def test_ranks_above_the_limit(llm, llama_checkpoint, tmp_path):
    adapter = write_adapter(llama_checkpoint, tmp_path / "wide", seed=0, r=17)
    with pytest.raises(EngineError, match=r"the rank is 17, this engine takes 1 to 16 \(max_lora_rank\)"):
        llm.load_lora("wide", adapter)


def test_legacy_checkpoints_are_named_in_the_error(llm, adapters, copy_of):
    directory = copy_of(adapters[0])
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(EngineError, match="must be converted to safetensors"):
        llm.load_lora("old", directory)


def test_unknown_names_and_engines_without_lora(llm, llama_checkpoint):
    with pytest.raises(
        InvalidParameter, match=re.escape("LoRA nobody is not supported, we currently support []")
    ):
        llm.generate(PROMPT, GREEDY, lora="nobody", progress=False)
    plain = LLM(llama_checkpoint, runner="reference")
    with pytest.raises(InvalidParameter, match="LoRA feature is not enabled"):
        plain.generate(PROMPT, GREEDY, lora="nobody", progress=False)
    with pytest.raises(EngineError, match="LoRA feature is not enabled"):
        plain.load_lora("nobody", "nowhere")


def test_tensor_name_variants(llm, adapters, copy_of, tmp_path):
    """Saved without the prefix, or with the adapter name in it."""
    expected = tokens_with(llm, LoraRequest(name="plain", path=str(adapters[0])))
    for name, rename in {
        "bare": lambda tensor: tensor.removeprefix("base_model.model."),
        "named": lambda tensor: tensor.replace(".weight", ".default.weight"),
    }.items():
        directory = shutil.copytree(adapters[0], tmp_path / name)
        path = directory / "adapter_model.safetensors"
        save_file({rename(tensor): value for tensor, value in load_file(path).items()}, path)
        assert tokens_with(llm, LoraRequest(name=name, path=str(directory))) == expected


def tokens_with(llm, lora):
    return llm.generate(PROMPT, GREEDY, lora=lora, progress=False)[0].outputs[0].token_ids


MODULE_IDS = {
    "q_proj": 1,
    "k_proj": 2,
    "v_proj": 3,
    "o_proj": 4,
    "gate_proj": 5,
    "down_proj": 6,
    "up_proj": 7,
}


def as_tensors(directory, dtype=np.float32, fuse=False) -> LoraTensors:
    """Return a peft checkpoint in TensorRT-LLM's format; with `fuse`, queries, keys and values are one module."""
    tensors = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    rows, ids = [], []
    for layer in range(3):
        pairs = {}
        for module in MODULE_IDS:
            part = "self_attn" if module[0] in "qkvo" else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}.lora_%s.weight"
            pairs[module] = tensors[name % "A"], tensors[name % "B"] * np.float32(scale)
        if fuse:
            fused = [pairs.pop(module) for module in ("q_proj", "k_proj", "v_proj")]
            rank = sum(len(a) for a, _ in fused)
            b, row, column = np.zeros((sum(len(b) for _, b in fused), rank), np.float32), 0, 0
            for a, part_b in fused:
                b[row : row + len(part_b), column : column + len(a)] = part_b
                row, column = row + len(part_b), column + len(a)
            pairs["qkv"] = np.concatenate([a for a, _ in fused]), b
        for module, (a, b) in pairs.items():
            rows.append(np.concatenate([a.reshape(-1), b.reshape(-1)]).astype(dtype))
            ids.append((MODULE_IDS.get(module, 0), layer, len(a)))
    width = max(map(len, rows)) + 3
    padded = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    return LoraTensors(dtype=np.dtype(dtype).name, width=width, weights=padded.tobytes(), config=ids)


@pytest.mark.parametrize("fuse", [False, True])
def test_weights_in_the_request(llm, adapters, fuse):
    expected = tokens_with(llm, LoraRequest(name="by path", path=str(adapters[1])))
    name = f"lora_task_id {int(fuse)}"
    assert tokens_with(llm, LoraRequest(name=name, tensors=as_tensors(adapters[1], fuse=fuse))) == expected
    assert tokens_with(llm, LoraRequest(name=name)) == expected, "it is cached"
    assert tokens_with(llm, None) != expected


def test_a_task_that_is_not_cached(llm):
    with pytest.raises(
        InvalidParameter, match="lora_task_id: 77 is not cached: send lora_weights and lora_config"
    ):
        llm.generate(PROMPT, GREEDY, lora=LoraRequest(name="lora_task_id 77"), progress=False)


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"config": [(1, 9, 4)]}, "lora_config", "layer 9 is not in this model of 3"),
        ({"config": [(8, 0, 4)]}, "lora_config", "module id 8"),
        ({"config": [(1, 0, 17)]}, "lora_config", "adapter size 17 is not in 1 to 16"),
        ({"config": [(1, 0, 0)]}, "lora_config", "adapter size 0"),
        ({"config": [(6, 0, 16)]}, "lora_weights", "too short for rank 16 of module 6"),
        ({"config": []}, "lora_weights", "0 rows"),
        ({"config": [(1, 0, 4)] * 2}, "lora_weights", "lora_config says 2 rows"),
        ({"width": 399}, "lora_weights", "1 rows of 399"),
    ],
)
def test_mismatched_tensors_are_rejected(llm, change, field, message):
    values = {"dtype": "bfloat16", "width": 400, "config": [(1, 0, 4)], **change}
    tensors = LoraTensors(weights=np.ones(400, ml_dtypes.bfloat16).tobytes(), **values)
    with pytest.raises(InvalidParameter, match=message) as caught:
        llm.generate(PROMPT, GREEDY, lora=LoraRequest(name="lora_task_id 5", tensors=tensors), progress=False)
    assert caught.value.field == field
