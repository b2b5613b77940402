"""Reader of the pooling settings of sentence-transformers checkpoints: modules.json and the folders listed in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from neso.engine.pooling.pooler import DenseLayer, Pooler
from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.weights.files import read_json, read_json_object
from neso.engine.weights.safetensors_file import SafetensorsFile
from neso.engine.weights.source import CheckpointError
from neso.generation.pooling import PoolingKind

_MODES: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
_ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.linear.Identity": "identity",
}


def read_pooler(directory: Path, default: PoolingKind) -> Pooler:
    """Return the pooler of a model directory; without modules.json, `default` with normalization.

    Raises `UnsupportedModel` for an unknown module, `CheckpointError` for invalid files.
    """
    path = directory / "modules.json"
    if not path.is_file():
        return Pooler(default)
    modules = read_json(path)
    if not isinstance(modules, list):
        raise CheckpointError(f"{path}: must hold a list of modules")
    kind, normalize, dense = default, False, []
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        folder = directory / str(module.get("path", ""))
        if name == "Pooling":
            kind = _kind(folder / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name == "Dense":
            dense.append(_dense(folder))
        elif name != "Transformer":
            raise UnsupportedModel(f"{path}: modules of type {name!r} are not supported")
    return Pooler(kind, normalize, tuple(dense))


def max_tokens(directory: Path) -> int | None:
    """Return the maximum number of tokens of a text according to sentence_bert_config.json; None if not set."""
    path = directory / "sentence_bert_config.json"
    if not path.is_file():
        return None
    length = read_json_object(path).get("max_seq_length")
    return length if isinstance(length, int) and length > 0 else None


def _kind(path: Path) -> PoolingKind:
    config = read_json_object(path)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(
            f"{path}: pooling by {', '.join(modes) or 'nothing'} is not supported; supported are {', '.join(_MODES)}"
        )
    if config.get("include_prompt") is False:
        raise UnsupportedModel(f"{path}: 'include_prompt' false is not supported")
    return _MODES[modes[0]]


def _dense(folder: Path) -> DenseLayer:
    config = read_json_object(folder / "config.json")
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"{folder / 'config.json'}: the activation {name!r} is not supported")
    file = SafetensorsFile(folder / "model.safetensors")
    try:
        weight = _float32(file, "linear.weight")
        bias = _float32(file, "linear.bias") if config.get("bias", True) else None
    finally:
        file.close()
    return DenseLayer(weight, bias, "tanh" if _ACTIVATIONS[name] == "tanh" else "identity")


def _float32(file: SafetensorsFile, name: str) -> npt.NDArray[np.float32]:
    if name not in file:
        raise CheckpointError(f"{file.path}: there is no tensor {name!r}")
    return np.array(file.tensor(name), np.float32)
