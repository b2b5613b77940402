"""The adapter_config.json that peft writes: what is refused, and the scale of each matrix."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from neso.engine.lora.errors import AdapterError
from neso.engine.weights.files import read_json_object
from neso.engine.weights.source import CheckpointError

CONFIG_FILE = "adapter_config.json"

# Each changes what the adapter computes, and is null, false or empty in plain LoRA.
_REFUSED = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole modules beside the low-rank changes (modules_to_save) are not supported",
    "use_qalora": "QA-LoRA is not supported",
    "lora_bias": "biases of B (lora_bias) are not supported",
    "layer_replication": "layer_replication is not supported",
    "trainable_token_indices": "trainable tokens are not supported",
    "target_parameters": "target_parameters is not supported",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens) is not supported",
    "arrow_config": "Arrow is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields that matter. Patterns are regular expressions for the ends of module names."""

    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> PeftConfig:
        """Raises `AdapterError` for what is missing, broken or not supported."""
        path = directory / CONFIG_FILE
        try:
            values = read_json_object(path)
        except CheckpointError as error:
            raise AdapterError(str(error)) from None
        _refuse(path, values)
        try:
            return cls(
                rank=msgspec.convert(values.get("r"), int),
                alpha=msgspec.convert(values.get("lora_alpha"), float),
                use_rslora=msgspec.convert(values.get("use_rslora") or False, bool),
                rank_pattern=msgspec.convert(values.get("rank_pattern") or {}, dict[str, int]),
                alpha_pattern=msgspec.convert(values.get("alpha_pattern") or {}, dict[str, float]),
            )
        except msgspec.ValidationError as error:
            raise AdapterError(f"{path}: r, lora_alpha, use_rslora or a pattern: {error}") from None

    def rank_of(self, module: str) -> int:
        """The rank of a module's change, by its name in the base model."""
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """What a module's change is multiplied by: alpha / rank, with rsLoRA alpha / sqrt(rank) (arXiv 2312.03732)."""
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _refuse(path: Path, values: dict[str, Any]) -> None:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path}: peft_type is {kind!r}, only LORA is supported")
    if values.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias is {values['bias']!r}, only 'none' is supported")
    for name, reason in _REFUSED.items():
        if values.get(name):
            raise AdapterError(f"{path}: {reason}")


def _matching(patterns: dict[str, Any], module: str) -> str:
    """The first pattern that matches the end of a module's name; "" for none."""
    for pattern in patterns:
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return pattern
        except re.error:
            raise AdapterError(f"{CONFIG_FILE}: {pattern!r} is no regular expression") from None
    return ""
