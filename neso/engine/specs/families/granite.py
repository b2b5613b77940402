"""Granite 3: Llama with multipliers on embeddings, scores, branches and logits."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.decoder_spec import DecoderSpec
from neso.engine.specs.families import llama


def granite(config: ConfigReader) -> DecoderSpec:
    return replace(
        llama.llama(config),
        family="granite",
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )
