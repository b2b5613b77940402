"""Writes a Llama checkpoint with random bfloat16 weights, which runs at the same speed as a trained one.

usage: python bench/checkpoint.py DIRECTORY {tiny|s|m|l}      tiny: 0.2 M, s: 28 M, m: 213 M, l: 1.24 B parameters
       python bench/checkpoint.py --smoke                     writes a tiny checkpoint to a temporary directory
"""

from __future__ import annotations

import json
import sys
import sysconfig
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SHAPES = {
    "tiny": {"vocab": 1024, "hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 256},
    "s": {"vocab": 8192, "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate": 1408},
    "m": {"vocab": 32000, "hidden": 1024, "layers": 16, "heads": 16, "kv_heads": 4, "intermediate": 2816},
    "l": {"vocab": 128256, "hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "intermediate": 8192},
}


def write_checkpoint(directory: Path, size: str) -> None:
    """Write weights, config and a byte-level BPE tokenizer trained on the standard library's sources."""
    shape = SHAPES[size]
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_weights(shape), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(_config(shape), indent=2))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    _tokenizer(shape["vocab"]).save(str(directory / "tokenizer.json"))


def _weights(shape: dict[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden, intermediate = shape["hidden"], shape["intermediate"]
    kv = hidden // shape["heads"] * shape["kv_heads"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns), np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    weights = {"model.embed_tokens.weight": matrix(shape["vocab"], hidden)}
    ones = np.ones(hidden, ml_dtypes.bfloat16)
    for i in range(shape["layers"]):
        layer = {
            "self_attn.q_proj": matrix(hidden, hidden),
            "self_attn.k_proj": matrix(kv, hidden),
            "self_attn.v_proj": matrix(kv, hidden),
            "self_attn.o_proj": matrix(hidden, hidden),
            "mlp.gate_proj": matrix(intermediate, hidden),
            "mlp.up_proj": matrix(intermediate, hidden),
            "mlp.down_proj": matrix(hidden, intermediate),
            "input_layernorm": ones,
            "post_attention_layernorm": ones,
        }
        weights |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    return weights | {"model.norm.weight": ones}


def _config(shape: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape["vocab"],
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def _tokenizer(vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        # The size of the model's vocabulary: the tokenizer must have a text for every token.
        vocab_size=vocabulary,
        min_frequency=1,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    if vocabulary <= SHAPES["tiny"]["vocab"]:
        sources = sources[:5]  # enough for a small vocabulary
    tokenizer.train([str(path) for path in sources], trainer)
    return tokenizer


if __name__ == "__main__":
    if sys.argv[1:] == ["--smoke"]:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), "tiny")
    else:
        write_checkpoint(Path(sys.argv[1]), sys.argv[2])
