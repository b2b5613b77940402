"""A tiny random Idefics 3. vLLM loads this vision model without torchvision."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checkpoints import EOS, SHAPE, VOCAB_SIZE, amplify_weights, randomize, write_tokenizer
from tokenizers import Tokenizer
from transformers import AutoConfig, Idefics3ForConditionalGeneration

EDGE, PATCH, SCALE = 28, 7, 2
"""Pixels of the vision tower's square and of its patches; a row of the output is of SCALE x SCALE patches."""
IMAGE_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_idefics(directory: Path, *, seed: int = 0) -> Path:
    """Write it into `directory` with its processor and return that. Larger images are cut into up to 2 x 2 tiles."""
    write_tokenizer(directory)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(list(IMAGE_TOKENS))
    tokenizer.save(path)
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    _make_model(seed, tokenizer.token_to_id("<image>")).save_pretrained(directory)
    _write_processor(directory)
    return directory


def _make_model(seed: int, image_token_id: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": EDGE,
        "patch_size": PATCH,
        "initializer_range": 0.5,
    }
    # Heads of 32: the smallest size that vLLM's CPU attention supports.
    shape = {**SHAPE, "vocab_size": VOCAB_SIZE + 16, "hidden_size": 128, "max_position_embeddings": 1024}
    text = AutoConfig.for_model("llama", **shape)
    config = AutoConfig.for_model(
        "idefics3",
        vision_config=vision,
        text_config=text.to_dict(),
        image_token_id=image_token_id,
        scale_factor=SCALE,
        pad_token_id=SHAPE["pad_token_id"],
        eos_token_id=EOS,
    )
    model = Idefics3ForConditionalGeneration(config)
    amplify_weights(model, "vision_model", "connector")
    randomize(model)
    return model


def _write_processor(directory: Path) -> None:
    images = {
        "image_processor_type": "Idefics3ImageProcessorPil",
        "processor_class": "Idefics3Processor",
        "size": {"longest_edge": 2 * EDGE},
        "max_image_size": {"longest_edge": EDGE},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    rows = (EDGE // PATCH // SCALE) ** 2
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": rows}
    (directory / "processor_config.json").write_text(json.dumps(processor))
