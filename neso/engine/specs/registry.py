"""Maps config.json to the spec of a model, by architecture name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from neso.engine.specs.config_reader import ConfigReader, UnsupportedModel
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.encoder_spec import EncoderSpec

# Architecture (config.json's `architectures`) to "module.function" in neso/engine/specs/families; modules are imported
# on first use. The function's name is the family's `model_type`, unless that is in `_OTHER_MODEL_TYPES`.
ARCHITECTURES = {
    "CohereForCausalLM": "cohere.cohere",
    "Cohere2ForCausalLM": "cohere.cohere2",
    "GemmaForCausalLM": "gemma.gemma",
    "Gemma2ForCausalLM": "gemma.gemma2",
    "Gemma3ForCausalLM": "gemma.gemma3",
    "Gemma3ForConditionalGeneration": "gemma.gemma3_multimodal",
    "GPT2LMHeadModel": "gpt2.gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode.gpt_bigcode",
    "GPTNeoXForCausalLM": "gpt_neox.gpt_neox",
    "GraniteForCausalLM": "granite.granite",
    "LlamaForCausalLM": "llama.llama",
    "MistralForCausalLM": "mistral.mistral",
    "MixtralForCausalLM": "mistral.mixtral",
    "Olmo2ForCausalLM": "olmo.olmo2",
    "Olmo3ForCausalLM": "olmo.olmo3",
    "OlmoeForCausalLM": "olmo.olmoe",
    "OPTForCausalLM": "opt.opt",
    "PhiForCausalLM": "phi.phi",
    "Phi3ForCausalLM": "phi.phi3",
    "Qwen2ForCausalLM": "qwen.qwen2",
    "Qwen2MoeForCausalLM": "qwen.qwen2_moe",
    "Qwen3ForCausalLM": "qwen.qwen3",
    "Qwen3MoeForCausalLM": "qwen.qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3.smollm3",
    "StableLmForCausalLM": "stablelm.stablelm",
    "Starcoder2ForCausalLM": "starcoder2.starcoder2",
}
_OTHER_MODEL_TYPES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}

# `model_type` to architecture, for a config.json without `architectures`.
MODEL_TYPES = {path.partition(".")[2]: name for name, path in ARCHITECTURES.items()} | _OTHER_MODEL_TYPES

_ENCODER_FAMILIES = {
    "Bert": "bert.bert",
    "Roberta": "bert.roberta",
    "XLMRoberta": "bert.roberta",
    "Camembert": "bert.roberta",
    "DistilBert": "bert.distilbert",
    "ModernBert": "modernbert.modernbert",
}
# The head of a masked language model is ignored, because only its layers are used.
_ENCODER_HEADS = ("Model", "ForSequenceClassification", "ForMaskedLM")
ENCODER_ARCHITECTURES = {
    family + head: function for family, function in _ENCODER_FAMILIES.items() for head in _ENCODER_HEADS
}
"""Architecture to "module.function" in neso/engine/specs/families."""

_WITHOUT_HEAD = ("Model", "ForSequenceClassification")
"""How the names of decoders without LM head end."""


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Return the spec of the decoder described by a config.json.

    Raises `UnsupportedModel` for an unknown architecture or feature, `InvalidConfig` for an invalid field.
    """
    reader = ConfigReader(config)
    module, _, function = ARCHITECTURES[_architecture(reader)].partition(".")
    spec: DecoderSpec = getattr(_family(module), function)(reader)
    # A checkpoint without LM head has no lm_head tensor; its logits are never used.
    return spec if has_head(config) else replace(spec, tied_embeddings=True)


def encoder_spec(config: Mapping[str, Any]) -> EncoderSpec | None:
    """Return the spec of the text encoder described by a config.json; None if it describes another kind of model.

    Raises `UnsupportedModel` for an unsupported feature, `InvalidConfig` for an invalid field.
    """
    architectures = config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else []:
        if name in ENCODER_ARCHITECTURES:
            module, _, function = ENCODER_ARCHITECTURES[name].partition(".")
            spec: EncoderSpec = getattr(_family(module), function)(ConfigReader(config))
            return spec
    return None


def has_head(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint has an LM head.

    "MistralModel" has only layers, for embeddings, and "MistralForSequenceClassification" a classifier.
    """
    listed = config.get("architectures")
    name = str(listed[0]) if isinstance(listed, list) and listed else ""
    return name.endswith("LMHeadModel") or not name.endswith(_WITHOUT_HEAD)


def is_embedding_model(checkpoint: Path | str) -> bool:
    """Whether a directory holds an encoder, or a decoder without LM head; False if it is not a checkpoint directory."""
    try:
        config = json.loads((Path(checkpoint) / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    architectures = config.get("architectures") or []
    return any(name in ENCODER_ARCHITECTURES for name in architectures) or not has_head(config)


def _family(module: str) -> Any:
    return import_module(f"neso.engine.specs.families.{module}")


def _architecture(config: ConfigReader) -> str:
    if config.value("architectures"):
        listed = config.value("architectures")
        if not isinstance(listed, list) or not isinstance(listed[0], str):
            raise config.invalid("architectures", f"must be a list of strings, not {listed!r}")
        name = listed[0]
    else:
        model_type = config.string("model_type")
        name = MODEL_TYPES.get(model_type, model_type)
    for suffix in _WITHOUT_HEAD:
        if name not in ARCHITECTURES and name.endswith(suffix):
            family = name.removesuffix(suffix)
            lm_head = f"{family}LMHeadModel"
            name = lm_head if lm_head in ARCHITECTURES else f"{family}ForCausalLM"
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return name
