"""Converts a Llama checkpoint to a GGUF file, like llama.cpp's converter. Needs the package `gguf`.

usage: python bench/gguf_checkpoint.py CHECKPOINT TARGET.gguf {BF16|F16|Q8_0|Q4_0}
       python bench/gguf_checkpoint.py --smoke      converts a tiny checkpoint in a temporary directory
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoint import write_checkpoint
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

from neso.engine.weights.checkpoint import Checkpoint


def write_gguf(checkpoint: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """Convert matrices to `kind` and vectors to F32."""
    with Checkpoint(checkpoint) as source:
        config = source.config
        writer = GGUFWriter(target, "llama")
        _write_config(writer, config)
        _write_tokenizer(
            writer, json.loads((checkpoint / "tokenizer.json").read_text()), config["vocab_size"]
        )
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
        for name in source.names():
            values = source.tensor(name).astype(np.float32)
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
            for part, field in heads.items():
                if f".{part}." in name:
                    values = _interleave_halves(values, config[field])
            own = names.get_name(name, (".weight", ".bias"))
            assert own is not None, name
            own_kind = kind if values.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(own, gguf.quants.quantize(values, own_kind), raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave_halves(weights: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head: llama.cpp rotates pairs (2i, 2i + 1)."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, weights.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def _write_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], vocab_size: int) -> None:
    names = {token_id: name for name, token_id in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    names |= special
    # The embedding may have more rows than the tokenizer has tokens.
    tokens = [names.get(token_id, f"<unused{token_id}>") for token_id in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            TokenType.CONTROL if i in special else TokenType.NORMAL if i in names else TokenType.UNUSED
            for i in range(vocab_size)
        ]
    )
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


if __name__ == "__main__":
    if sys.argv[1:] == ["--smoke"]:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), "tiny")
            write_gguf(Path(folder), Path(folder) / "model.gguf", GGMLQuantizationType.Q8_0)
    else:
        write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), GGMLQuantizationType[sys.argv[3]])
