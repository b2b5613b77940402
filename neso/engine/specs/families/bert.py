"""Text encoders: BERT, RoBERTa and DistilBERT."""

from __future__ import annotations

from dataclasses import replace

from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.encoder_spec import (
    EmbeddingRole,
    EncoderSpec,
    LayerRole,
    LayerStackSpec,
    read_activation,
    read_classifier,
    read_head_dim,
    require_absolute_positions,
)

_BERT_LAYER = "encoder.layer.{layer}."

BERT_LAYER_NAMES: dict[LayerRole, str] = {
    "query": _BERT_LAYER + "attention.self.query",
    "key": _BERT_LAYER + "attention.self.key",
    "value": _BERT_LAYER + "attention.self.value",
    "output": _BERT_LAYER + "attention.output.dense",
    "attention_norm": _BERT_LAYER + "attention.output.LayerNorm",
    "up": _BERT_LAYER + "intermediate.dense",
    "down": _BERT_LAYER + "output.dense",
    "mlp_norm": _BERT_LAYER + "output.LayerNorm",
}

BERT_EMBEDDING_NAMES: dict[EmbeddingRole, str] = {
    "word": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "type": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
_DISTILBERT_LAYER = "transformer.layer.{layer}."

DISTILBERT_LAYER_NAMES: dict[LayerRole, str] = {
    "query": _DISTILBERT_LAYER + "attention.q_lin",
    "key": _DISTILBERT_LAYER + "attention.k_lin",
    "value": _DISTILBERT_LAYER + "attention.v_lin",
    "output": _DISTILBERT_LAYER + "attention.out_lin",
    "attention_norm": _DISTILBERT_LAYER + "sa_layer_norm",
    "up": _DISTILBERT_LAYER + "ffn.lin1",
    "down": _DISTILBERT_LAYER + "ffn.lin2",
    "mlp_norm": _DISTILBERT_LAYER + "output_layer_norm",
}

DISTILBERT_EMBEDDING_NAMES: dict[EmbeddingRole, str] = {
    "word": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "norm": "embeddings.LayerNorm",
}


def bert(config: ConfigReader) -> EncoderSpec:
    """BERT (arXiv 1810.04805)."""
    require_absolute_positions(config)
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    positions = config.integer("max_position_embeddings", 512)
    return EncoderSpec(
        family="bert",
        vocab_size=config.integer("vocab_size"),
        num_positions=positions,
        max_position=positions,
        padding_id=None,
        num_token_types=config.integer("type_vocab_size", 2, minimum=0),
        layers=LayerStackSpec(
            hidden_size=hidden_size,
            num_layers=config.integer("num_hidden_layers"),
            num_heads=num_heads,
            head_dim=read_head_dim(hidden_size, num_heads, config),
            intermediate_size=config.integer("intermediate_size"),
            norm_eps=config.number("layer_norm_eps", 1e-12),
            activation=read_activation(config),
            norm_first=False,
            tensor_names=BERT_LAYER_NAMES,
        ),
        classifier=read_classifier(config, dense="pooler.dense", out="classifier"),
        prefix="bert.",
        tensor_names=BERT_EMBEDDING_NAMES,
    )


def roberta(config: ConfigReader) -> EncoderSpec:
    """RoBERTa (arXiv 1907.11692), XLM-RoBERTa, CamemBERT: BERT with different positions and classifier."""
    spec = bert(config)
    padding_id = config.integer("pad_token_id", 1, minimum=0)
    return replace(
        spec,
        family="roberta",
        padding_id=padding_id,
        max_position=spec.num_positions - padding_id - 1,
        classifier=read_classifier(config, dense="classifier.dense", out="classifier.out_proj"),
        prefix="roberta.",
    )


def distilbert(config: ConfigReader) -> EncoderSpec:
    """DistilBERT (arXiv 1910.01108): BERT with half the layers and without token types."""
    hidden_size, num_heads = config.integer("dim", 768), config.integer("n_heads", 12)
    positions = config.integer("max_position_embeddings", 512)
    return EncoderSpec(
        family="distilbert",
        vocab_size=config.integer("vocab_size"),
        num_positions=positions,
        max_position=positions,
        padding_id=None,
        num_token_types=0,
        layers=LayerStackSpec(
            hidden_size=hidden_size,
            num_layers=config.integer("n_layers", 6),
            num_heads=num_heads,
            head_dim=read_head_dim(hidden_size, num_heads, config, "dim"),
            intermediate_size=config.integer("hidden_dim", 4 * 768),
            norm_eps=1e-12,
            activation=read_activation(config, "activation"),
            norm_first=False,
            tensor_names=DISTILBERT_LAYER_NAMES,
        ),
        classifier=read_classifier(config, dense="pre_classifier", out="classifier", activation="relu"),
        prefix="distilbert.",
        tensor_names=DISTILBERT_EMBEDDING_NAMES,
    )
