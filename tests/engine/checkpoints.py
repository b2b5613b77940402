"""Tiny random Hugging Face checkpoints, written with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 384
BOS, EOS, PAD = 0, 1, 2

# Heads are wider than hidden_size / heads in Qwen 3, as in the real model.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    # Far above the usual 0.02: logits spread out, so that greedy tokens are not near ties.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}

_WINDOWED = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 12,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 16, "use_sliding_window": False},
    # Narrow windows, so that short texts exceed them.
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 20, "tie_word_embeddings": True, **_WINDOWED},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 20, "tie_word_embeddings": True, **_WINDOWED},
    "gemma": {"head_dim": 16, "tie_word_embeddings": True},
    "smollm3": {"tie_word_embeddings": True},
    "olmo3": {**_WINDOWED},
    "phi3": {},
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 512, "tie_word_embeddings": True},
    "gpt_bigcode": {"tie_word_embeddings": True},
    "gpt_neox": {"hidden_size": 64},
    "opt": {"ffn_dim": 80, "init_std": 0.3, "tie_word_embeddings": True},
    "phi": {},
    "granite": {},
    "olmo2": {},
    "starcoder2": {"tie_word_embeddings": True},
    "stablelm": {"hidden_size": 64},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "head_dim": 12, **_WINDOWED},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 56,
    },
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]

_TEXT = [
    "The quick brown fox jumps over the lazy dog. A server answers requests, and a client waits for them.",
    "In 1989 Voyager 2 found six moons of Neptune; Neso, the outermost, was found in 2002.",
    "def add(a, b):\n    return a + b\n",
]


def make_checkpoint(
    directory: Path,
    arch: str = "llama",
    *,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    labels: int = 0,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a checkpoint with a tokenizer into `directory` and return it; with `labels`, a classifier.

    - arch: one of `ARCHITECTURES`
    - dtype: of the weights on disk: "float32", "bfloat16" or "float16"
    - max_shard_size: such as "20KB", for several files with an index
    - overrides: fields of the config.json
    """
    fields = {**SHAPE, **ARCHITECTURES[arch], **overrides}
    torch.manual_seed(seed)
    factory = AutoModelForCausalLM
    if labels:
        factory, fields = AutoModelForSequenceClassification, {"num_labels": labels, **fields}
    model = factory.from_config(AutoConfig.for_model(arch, **fields))
    randomize(model)
    model.to(getattr(torch, dtype))
    sharding = {"max_shard_size": max_shard_size} if max_shard_size else {}
    model.save_pretrained(directory, **sharding)
    write_tokenizer(directory)
    return directory


def randomize(model: torch.nn.Module) -> None:
    """Give biases and norms values other than their initial 0 and 1, so that tests cover them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def amplify_weights(model: torch.nn.Module, *parts: str) -> None:
    """Give the weights of `parts`, between image and text, large values, so that the output depends on the image."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts):
                parameter.copy_(torch.randn_like(parameter) * 0.25)


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer of at most `VOCAB_SIZE` tokens, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def rewrite_config(directory: Path, remove: tuple[str, ...] = (), **fields: Any) -> None:
    """Change config.json to values that transformers would not write."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for field in remove:
        config.pop(field, None)
    path.write_text(json.dumps({**config, **fields}))


def load_oracle(directory: Path) -> torch.nn.Module:
    """Load the same model in transformers, float32."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


ENCODER_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": PAD,
    "initializer_range": 0.2,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "distilbert": {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4},
    # The reach of local attention, 6 tokens on each side, is shorter than the texts of the tests.
    "modernbert": {
        "local_attention": 13,
        "global_attn_every_n_layers": 2,
        "cls_token_id": BOS,
        "sep_token_id": EOS,
    },
}


def make_encoder(
    directory: Path,
    arch: str = "bert",
    *,
    labels: int = 0,
    dtype: str = "float32",
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write an encoder with a tokenizer into `directory` and return it; with `labels`, a classifier."""
    from transformers import AutoModel

    torch.manual_seed(seed)
    config = AutoConfig.for_model(arch, **{**ENCODER_SHAPE, **ENCODERS[arch], **overrides})
    if labels:
        config.num_labels = labels
    factory = AutoModelForSequenceClassification if labels else AutoModel
    model = factory.from_config(config)
    randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    write_encoder_tokenizer(directory)
    return directory


def write_encoder_tokenizer(directory: Path) -> None:
    """Write the byte-level tokenizer with a BERT-like template: <s> A </s>, and <s> A </s> B </s> for pairs."""
    from tokenizers import processors

    write_tokenizer(directory)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    tokenizer.save(path)


IMAGE_TOKEN = "<image>"


def make_llava(
    directory: Path, *, seed: int = 0, text: str = "llama", tower: str = "clip", **overrides: Any
) -> Path:
    """Write a LLaVA for images of 28 x 28 pixels and 16 patches, with tokenizer, chat template and image processor.

    `tower`: "clip" or "siglip".
    """
    from transformers import LlavaForConditionalGeneration

    write_tokenizer(directory)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([IMAGE_TOKEN])
    tokenizer.save(path)
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}<|{{ message['role'] }}|>"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    torch.manual_seed(seed)
    projection = {"projection_dim": 16} if tower == "clip" else {"vision_use_head": False}
    vision = AutoConfig.for_model(
        f"{tower}_vision_model",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=28,
        patch_size=7,
        initializer_range=0.5,
        **projection,
    )
    language = AutoConfig.for_model(text, **{**SHAPE, **ARCHITECTURES[text], "vocab_size": VOCAB_SIZE + 16})
    config = AutoConfig.for_model(
        "llava",
        vision_config=vision.to_dict(),
        text_config=language.to_dict(),
        image_token_id=tokenizer.token_to_id(IMAGE_TOKEN),
        **overrides,
    )
    model = LlavaForConditionalGeneration(config)
    amplify_weights(model, "vision_tower", "projector")
    randomize(model)
    processor = {"processor_class": "LlavaProcessor", "patch_size": 7, "num_additional_image_tokens": 1}
    processor["vision_feature_select_strategy"] = "default"
    (directory / "processor_config.json").write_text(json.dumps(processor))
    model.save_pretrained(directory)
    size = {"height": 28, "width": 28}
    processors = {
        "clip": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": size,
            "do_center_crop": True,
        },
        "siglip": {"image_processor_type": "SiglipImageProcessor", "size": size},
    }
    processor = {"resample": 3, **processors[tower]}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory
