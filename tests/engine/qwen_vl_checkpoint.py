"""Tiny random Qwen2-VL and Qwen2.5-VL models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch
import transformers
from checkpoints import EOS, SHAPE, VOCAB_SIZE, amplify_weights, randomize, write_tokenizer
from tokenizers import Tokenizer
from transformers import AutoConfig

PATCH, MERGE = 4, 2
EDGE = PATCH * MERGE
"""Edge in pixels of the square of a token."""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    + IMAGE
    + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Kind = Literal["qwen2_vl", "qwen2_5_vl"]
_CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}


def make_qwen_vl(directory: Path, kind: Kind, *, seed: int = 0) -> Path:
    """Write a model with tokenizer, chat template and image processor into `directory` and return that.

    Images become 2 to 24 tokens. Windows of Qwen2.5-VL are 2 x 2 tokens.
    """
    write_tokenizer(directory)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    tokenizer.save(path)
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    _make_model(seed, kind, {name: tokenizer.token_to_id(name) for name in VISION_TOKENS}).save_pretrained(
        directory
    )
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 2 * EDGE**2,
        "max_pixels": 24 * EDGE**2,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def _make_model(seed: int, kind: Kind, tokens: dict[str, int]) -> torch.nn.Module:
    torch.manual_seed(seed)
    vision = {
        "depth": 3,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 16, "mlp_ratio": 2, "hidden_size": SHAPE["hidden_size"]}
    else:
        vision |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": SHAPE["hidden_size"]}
        vision |= {"window_size": 2 * EDGE, "fullatt_block_indexes": [1]}
    head_dim = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    time = head_dim // 8
    rest = head_dim // 2 - time
    sections = [time, rest // 2, rest - rest // 2]
    text = {
        **SHAPE,
        "vocab_size": VOCAB_SIZE + 16,
        "eos_token_id": EOS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
    }
    config = AutoConfig.for_model(
        kind,
        vision_config=vision,
        text_config=text,
        image_token_id=tokens["<|image_pad|>"],
        video_token_id=tokens["<|video_pad|>"],
        vision_start_token_id=tokens["<|vision_start|>"],
        vision_end_token_id=tokens["<|vision_end|>"],
    )
    model = getattr(transformers, _CLASSES[kind])(config)
    amplify_weights(model, "visual")
    randomize(model)
    return model
