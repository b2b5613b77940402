"""StarCoder 1 and SantaCoder: GPT-2 with one key-value head, or with fused heads."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec, Role, TensorLocation, TensorPart
from neso.engine.specs.families import gpt2

_LAYER = "transformer.h.{layer}."


def gpt_bigcode(config: ConfigReader) -> DecoderSpec:
    spec = gpt2.gpt2(config.with_default("activation_function", "gelu_pytorch_tanh"))
    multi_query = config.boolean("multi_query", True)
    return replace(
        spec,
        family="gpt_bigcode",
        num_kv_heads=1 if multi_query else spec.num_heads,
        tensor_names={
            **spec.tensor_names,
            "output": _LAYER + "attn.c_proj.weight",
            "up": _LAYER + "mlp.c_fc.weight",
            "down": _LAYER + "mlp.c_proj.weight",
            **_fused(spec.num_heads, spec.head_dim, multi_query),
        },
    )


def _fused(num_heads: int, head_dim: int, multi_query: bool) -> dict[Role, TensorLocation]:
    """Return the layout of the fused tensor: all queries, then one key and one value.

    Without multi-query attention: query, key and value of each head.
    """
    query = num_heads * head_dim if multi_query else head_dim
    ends = query, query + head_dim, query + 2 * head_dim
    groups = 1 if multi_query else num_heads

    def part(kind: str, index: int) -> TensorPart:
        begin = ends[index - 1] if index else 0
        return TensorPart(f"{_LAYER}attn.c_attn.{kind}", groups * ends[-1], begin, ends[index], groups)

    return {
        "query": part("weight", 0),
        "key": part("weight", 1),
        "value": part("weight", 2),
        "query_bias": part("bias", 0),
        "key_bias": part("bias", 1),
        "value_bias": part("bias", 2),
    }
