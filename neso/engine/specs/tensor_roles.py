"""The roles that checkpoint tensors play in a decoder, and their shapes. A family maps roles to names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from neso.engine.specs.decoder_spec import DecoderSpec

Role = Literal[
    # once in a model
    "embedding",
    "final_norm",
    "lm_head",
    # once in a layer
    "attention_norm",
    "query",
    "key",
    "value",
    "query_bias",
    "key_bias",
    "value_bias",
    "query_norm",
    "key_norm",
    "output",
    "output_bias",
    "mlp_norm",
    "gate",
    "up",
    "gate_bias",
    "up_bias",
    "down",
    "down_bias",
]

Shape = tuple[int, ...]


def model_shapes(spec: DecoderSpec) -> dict[Role, Shape]:
    """The tensors outside the layers. With tied embeddings the embedding serves as lm_head."""
    shapes: dict[Role, Shape] = {
        "embedding": (spec.vocab_size, spec.hidden_size),
        "final_norm": (spec.hidden_size,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def layer_shapes(spec: DecoderSpec) -> dict[Role, Shape]:
    """The tensors of each layer. Matrices are [outputs, inputs], as checkpoints have them."""
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[Role, Shape] = {
        "attention_norm": (hidden,),
        "query": (query, hidden),
        "key": (kv, hidden),
        "value": (kv, hidden),
        "output": (hidden, query),
        "mlp_norm": (hidden,),
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "down": (hidden, intermediate),
    }
    if spec.qkv_bias:
        shapes |= {"query_bias": (query,), "key_bias": (kv,), "value_bias": (kv,)}
    if spec.output_bias:
        shapes |= {"output_bias": (hidden,)}
    if spec.mlp_bias:
        shapes |= {"gate_bias": (intermediate,), "up_bias": (intermediate,), "down_bias": (hidden,)}
    if spec.qk_norm:
        shapes |= {"query_norm": (spec.head_dim,), "key_norm": (spec.head_dim,)}
    return shapes
