"""Reader of adapters in PEFT format."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt

from neso.engine.lora.adapter import LoraAdapter, LowRank, Target, targets_of
from neso.engine.lora.config import AdapterError
from neso.engine.specs.decoder_spec import DecoderSpec, TensorLocation, TensorPart
from neso.engine.weights.files import read_json_object
from neso.engine.weights.safetensors_file import SafetensorsFile
from neso.engine.weights.source import CheckpointError, is_float

CONFIG_FILE = "adapter_config.json"
# Each of these options changes the computation; it is null, false or empty in plain LoRA.
_UNSUPPORTED = {
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
    """The fields that Neso uses. Patterns are regular expressions for the ends of module names."""

    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> PeftConfig:
        """Read the configuration. Raises `AdapterError` for missing, invalid or unsupported fields."""
        path = directory / CONFIG_FILE
        try:
            values = read_json_object(path)
        except CheckpointError as error:
            raise AdapterError(str(error)) from None
        _check_supported(path, values)
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
        """Return the rank of a module's update, by the module's name in the base model."""
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of a module's update: alpha / rank; with rsLoRA alpha / sqrt(rank) (arXiv 2312.03732)."""
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _check_supported(path: Path, values: dict[str, Any]) -> None:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path}: peft_type is {kind!r}, only LORA is supported")
    if values.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias is {values['bias']!r}, only 'none' is supported")
    for name, reason in _UNSUPPORTED.items():
        if values.get(name):
            raise AdapterError(f"{path}: {reason}")


def _matching(patterns: dict[str, Any], module: str) -> str:
    """Return the first pattern that matches the end of a module's name; "" if none matches."""
    for pattern in patterns:
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return pattern
        except re.error:
            raise AdapterError(f"{CONFIG_FILE}: {pattern!r} is no regular expression") from None
    return ""


WEIGHTS_FILE = "adapter_model.safetensors"
# The prefix `base_model.model.` may have been stripped; the adapter name is missing in files saved by PEFT.
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight$")
Sides = dict[str, npt.NDArray[Any]]


def read_peft_checkpoint(directory: Path, spec: DecoderSpec, max_rank: int) -> LoraAdapter:
    """Return the adapter for the model of `spec`; its tensors are views of the file.

    Raises `AdapterError` for missing or invalid files, unsupported options, and shapes that do not fit.
    """
    if not directory.is_dir():
        raise AdapterError(f"{directory}: there is no such directory")
    config = PeftConfig.read(directory)
    sides = _read_sides(directory)
    places = _places(spec)
    layers: list[dict[Target, LowRank]] = [{} for _ in range(spec.num_layers)]
    for module, pair in sides.items():
        if module not in places:
            raise AdapterError(
                f"{directory}: the adapter changes {module}, which is no linear layer of this model that can be adapted"
            )
        change = _low_rank(directory, config, module, pair)
        for layer, target in places[module]:
            layers[layer][target] = _part(directory, module, change, spec.tensor_names[target])
    adapter = LoraAdapter(tuple(layers))
    try:
        adapter.check(spec, max_rank)
    except AdapterError as error:
        raise AdapterError(f"{directory}: {error}") from None
    return adapter


def _places(spec: DecoderSpec) -> dict[str, list[tuple[int, Target]]]:
    """Map the checkpoint's modules to the model's matrices: one matrix each, or several fused ones."""
    places: dict[str, list[tuple[int, Target]]] = {}
    for layer in range(spec.num_layers):
        for target in targets_of(spec, layer):
            module = spec.tensor_name(target, layer).removesuffix(".weight")
            places.setdefault(module, []).append((layer, target))
    return places


def _part(directory: Path, module: str, change: LowRank, place: TensorLocation) -> LowRank:
    """Return the part of a fused module's update that applies to the matrix at `place`."""
    if not isinstance(place, TensorPart):
        return change
    if len(change.b) != place.outputs:
        raise AdapterError(
            f"{directory}: {module}: B {list(change.b.shape)} does not fit {place.outputs} outputs; is the adapter for "
            "another model?"
        )
    return replace(change, b=change.b[place.rows()])


def _read_sides(directory: Path) -> dict[str, Sides]:
    """Read A and B of each module."""
    path = directory / WEIGHTS_FILE
    if not path.exists():
        older = directory / "adapter_model.bin"
        hint = " (adapter_model.bin must be converted to safetensors)" if older.exists() else ""
        raise AdapterError(f"{directory}: there is no {WEIGHTS_FILE}{hint}")
    try:
        file = SafetensorsFile(path)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    sides: dict[str, Sides] = {}
    for name in file.names():
        match = _TENSOR.match(name)
        if match is None:
            raise AdapterError(f"{path}: tensor {name!r} is no part of a low-rank change that is supported")
        tensor = file.tensor(name)
        if tensor.ndim != 2 or not is_float(tensor.dtype):
            raise AdapterError(
                f"{path}: tensor {name!r} of {tensor.dtype} {list(tensor.shape)} is no float matrix"
            )
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    return sides


def _low_rank(directory: Path, config: PeftConfig, module: str, pair: Sides) -> LowRank:
    if len(pair) != 2:
        raise AdapterError(f"{directory}: {module} has only one of lora_A and lora_B")
    rank = len(pair["A"])
    if rank != config.rank_of(module):
        raise AdapterError(
            f"{directory}: {module} has the rank {rank}, adapter_config.json says {config.rank_of(module)}"
        )
    return LowRank(pair["A"], pair["B"], config.scale_of(module, rank))
