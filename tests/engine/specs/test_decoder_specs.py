"""config.json to DecoderSpec: families, old and new config formats, and invalid fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ARCHITECTURES as ARCHITECTURES_OF_TESTS

from neso.engine.specs.config_reader import InvalidConfig, SpecError, UnsupportedModel
from neso.engine.specs.decoder_spec import DecoderSpec, TensorPart, all_tensors, layer_shapes
from neso.engine.specs.registry import ARCHITECTURES, decoder_spec
from neso.engine.specs.rotary_spec import LinearScaling

# As written before transformers 5.
OLD_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
OLD_QWEN2 = {**OLD_LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
OLD_QWEN3 = {**OLD_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
OLD_MISTRAL = {**OLD_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {field: value for field, value in config.items() if field not in fields}


def test_old_llama_config() -> None:
    spec = decoder_spec(OLD_LLAMA)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 2, 8)
    assert spec.rotaries[0].theta == 500000.0
    assert spec.rotaries[0].scaling is None
    assert spec.norm_eps == 1e-5
    assert not spec.tied_embeddings
    assert spec.sliding_windows == (None,) * 4
    assert spec.attention_scale == pytest.approx(8**-0.5)
    assert spec.tensor_name("gate", 3) == "model.layers.3.mlp.gate_proj.weight"


@pytest.mark.parametrize("arch", ARCHITECTURES_OF_TESTS)
def test_every_tensor_of_a_checkpoint_has_a_role_and_shape(
    checkpoint_factory: Callable[..., Path], arch: str
) -> None:
    from safetensors.numpy import load_file

    directory = checkpoint_factory(arch)
    spec = decoder_spec(json.loads((directory / "config.json").read_text()))
    expected = {}
    for role, layer, expert, shape in all_tensors(spec):
        place = spec.tensor_names[role]
        if isinstance(place, TensorPart):
            shape = (place.outputs, *shape[1:])[:: -1 if place.transposed else 1]
        expected[spec.tensor_name(role, layer, expert)] = shape
    stored = {name: tensor.shape for name, tensor in load_file(directory / "model.safetensors").items()}
    assert expected == stored


def test_biases_of_llama_cover_output_too() -> None:
    spec = decoder_spec({**OLD_LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, True, True)
    assert layer_shapes(spec)["down_bias"] == (64,)


def test_default_heads() -> None:
    assert decoder_spec(without(OLD_LLAMA, "num_key_value_heads")).num_kv_heads == 8
    assert decoder_spec({**OLD_LLAMA, "head_dim": 32}).head_dim == 32
    assert decoder_spec(OLD_QWEN3).head_dim == 128
    assert decoder_spec({**OLD_QWEN3, "hidden_size": 61, "head_dim": 16}).head_dim == 16


def test_model_type_is_used_without_architectures() -> None:
    assert decoder_spec(without(OLD_QWEN2, "architectures")).family == "qwen2"
    assert decoder_spec({**OLD_QWEN2, "architectures": []}).family == "qwen2"


@pytest.mark.parametrize("layers", [("full_attention", "sliding_attention") * 2, None])
def test_qwen_windows(layers: tuple[str, ...] | None) -> None:
    config = {
        **OLD_QWEN2,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 3,
        "layer_types": list(layers) if layers else None,
    }
    expected = (None, 16, None, 16) if layers else (None, None, None, 16)
    assert decoder_spec(config).sliding_windows == expected
    assert decoder_spec({**config, "model_type": "qwen3"}).sliding_windows == expected


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}, None),
        ({"sliding_window": 16, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ({"use_sliding_window": True, "sliding_window": 16}, None),  # max_window_layers is 28 by default
    ],
)
def test_qwen_window_defaults(fields: dict[str, Any], window: int | None) -> None:
    assert decoder_spec({**OLD_QWEN2, **fields}).sliding_windows == (window,) * 4


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"sliding_window": 32}, 32),
        ({"sliding_window": None}, None),
        ({}, 4096),
        ({"sliding_window": 32, "layer_types": ["sliding_attention"] * 4}, 32),
    ],
)
def test_mistral_window(fields: dict[str, Any], window: int | None) -> None:
    assert decoder_spec({**OLD_MISTRAL, **fields}).sliding_windows == (window,) * 4


def test_unknown_architecture_names_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel, match="GPTJForCausalLM") as caught:
        decoder_spec({**OLD_LLAMA, "architectures": ["GPTJForCausalLM"]})
    for architecture in ARCHITECTURES:
        assert architecture in str(caught.value)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**OLD_LLAMA, "hidden_act": "swiglu2"}, "hidden_act"),
        ({**OLD_LLAMA, "quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({**OLD_LLAMA, "rope_scaling": {"type": "proportional", "factor": 2.0}}, "rope_scaling"),
        ({**OLD_LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        (
            {
                **OLD_LLAMA,
                "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True},
            },
            "mrope_interleaved",
        ),
        ({**OLD_MISTRAL, "layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        (
            {**OLD_QWEN2, "use_sliding_window": True, "layer_types": ["chunked_attention"] * 4},
            "layer_types",
        ),
    ],
)
def test_unsupported_features_are_named_in_errors(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModel, match=field):
        decoder_spec(config)


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("config", [OLD_LLAMA, OLD_MISTRAL, OLD_QWEN2, OLD_QWEN3])
@pytest.mark.parametrize("field", REQUIRED)
@pytest.mark.parametrize("value", ["absent", None, 0, -1, 1.5, "8", True, [8], {}])
def test_invalid_sizes(config: dict[str, Any], field: str, value: Any) -> None:
    broken = without(config, field) if value == "absent" else {**config, field: value}
    with pytest.raises(InvalidConfig, match=field):
        decoder_spec(broken)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**OLD_LLAMA, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({**OLD_LLAMA, "hidden_size": 65}, "hidden_size"),
        ({**OLD_LLAMA, "head_dim": 7}, "head_dim"),
        ({**OLD_LLAMA, "head_dim": "64"}, "head_dim"),
        ({**OLD_LLAMA, "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({**OLD_LLAMA, "rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({**OLD_LLAMA, "rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({**OLD_LLAMA, "rope_theta": -1}, "rope_theta"),
        ({**OLD_LLAMA, "rope_theta": 10**400}, "rope_theta"),
        ({**OLD_LLAMA, "rope_scaling": "linear"}, "rope_scaling"),
        ({**OLD_LLAMA, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        (
            {**OLD_LLAMA, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}},
            "rope_scaling.mrope_section",
        ),
        ({**OLD_LLAMA, "rope_scaling": {"type": "dynamic", "factor": 0.5}}, "rope_scaling.factor"),
        ({**OLD_LLAMA, "rope_scaling": {"rope_type": 3, "factor": 2.0}}, "rope_scaling.rope_type"),
        ({**OLD_LLAMA, "rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
        ({**OLD_LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({**OLD_LLAMA, "max_position_embeddings": None, "attention_bias": 1}, "attention_bias"),
        ({**OLD_LLAMA, "hidden_act": 5}, "hidden_act"),
        ({**OLD_LLAMA, "architectures": "LlamaForCausalLM"}, "architectures"),
        ({**OLD_LLAMA, "architectures": [None]}, "architectures"),
        ({**OLD_LLAMA, "architectures": {"a": 1}}, "architectures"),
        (without(OLD_LLAMA, "architectures", "model_type"), "model_type"),
        ({}, "model_type"),
        ({**OLD_MISTRAL, "sliding_window": 0}, "sliding_window"),
        ({**OLD_MISTRAL, "sliding_window": "4096"}, "sliding_window"),
        ({**OLD_QWEN2, "use_sliding_window": 1}, "use_sliding_window"),
        ({**OLD_QWEN2, "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({**OLD_QWEN2, "layer_types": ["full_attention"]}, "layer_types"),
        ({**OLD_QWEN2, "layer_types": "full"}, "layer_types"),
        ({**OLD_QWEN2, "layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ],
)
def test_invalid_fields(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig, match=field):
        decoder_spec(config)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM"])
def test_top_k_above_the_number_of_experts(name: str) -> None:
    config = {
        **OLD_LLAMA,
        "architectures": [name],
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    assert decoder_spec(config).experts
    with pytest.raises(InvalidConfig, match="num_experts_per_tok is 5"):
        decoder_spec({**config, "num_experts_per_tok": 5})


@pytest.mark.parametrize("field", sorted(OLD_LLAMA))
@pytest.mark.parametrize("value", [None, -5, 2.5, "", "x", [], [[]], {}, {"a": {}}, True, float("inf")])
def test_invalid_values_raise_only_spec_errors(field: str, value: Any) -> None:
    try:
        spec = decoder_spec({**OLD_LLAMA, field: value})
    except SpecError as error:
        assert str(error)
    else:
        assert isinstance(spec, DecoderSpec)


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({}, "gelu_tanh"),
        ({"hidden_act": "gelu"}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": "relu"}, "relu"),
        ({"hidden_act": "silu"}, "silu"),
    ],
)
def test_gelu_of_gemma_1_is_the_tanh_approximation(fields: dict[str, Any], activation: str) -> None:
    config = {**OLD_LLAMA, "architectures": ["GemmaForCausalLM"], "hidden_act": None, **fields}
    assert decoder_spec(config).activation == activation


def test_wrong_layers_of_smollm3_name_the_field() -> None:
    config = {**OLD_LLAMA, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}
    with pytest.raises(InvalidConfig, match="no_rope_layers"):
        decoder_spec(config)


def test_spec_is_hashable_and_pickles() -> None:
    import pickle

    spec = decoder_spec({**OLD_LLAMA, "rope_scaling": {"type": "linear", "factor": 2}})
    assert spec.rotaries[0].scaling == LinearScaling(2.0)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(decoder_spec({**OLD_LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}))


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 2048),
        ({"type": "linear", "factor": 4.0}, 8192),
        ({"type": "dynamic", "factor": 2.0}, 4096),
        # `max_position_embeddings` is the length before YaRN in Qwen 2.5's instructions, after it in most checkpoints.
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "linear", "factor": 1e300}, 2**31 - 1),
    ],
)
def test_rotary_scaling_extends_the_context(scaling: dict[str, Any] | None, length: int) -> None:
    assert decoder_spec({**OLD_QWEN2, "rope_scaling": scaling}).max_position == length
