"""The adapters that a model's name may be followed by."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import orjson

from neso.frontends.openai.tensor_models import missing_for_text, takes_adapter, takes_adapter_number
from neso.generation import SupportsLora
from neso.generation.request import TASK_PREFIX

if TYPE_CHECKING:
    from neso.server.model import Model

logger = logging.getLogger(__name__)

_FILE = "multi_lora.json"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a model: its name, and what the model is told."""

    model: Model
    name: str
    told: str


class AdapterNames:
    """What adapters models have: what their text face lists, or the file multi_lora.json beside a model of tensors.

    That holds names with paths, as for Triton's vLLM backend, or with the numbers that TensorRT-LLM's models know the
    adapters by (`lora_task_id`).
    """

    def __init__(self) -> None:
        self._files: WeakKeyDictionary[Model, dict[str, str]] = WeakKeyDictionary()

    def of(self, model: Model) -> list[Adapter]:
        """Those that are known by a name."""
        face = model.language_model
        if isinstance(face, SupportsLora):
            # One without a path is known to those who sent it, by its number.
            names = {name: name for name, path in face.list_loras().items() if path is not None}
        elif face is None and takes_adapter(model.signature) and not missing_for_text(model.signature):
            names = self._of_file(model)
        else:
            names = {}
        return [Adapter(model, name, told) for name, told in names.items()]

    def numbered(self, model: Model, number: str) -> Adapter | None:
        """The adapter that a model knows by a number, if it can know any so."""
        face = model.language_model
        if not number.isdecimal():
            return None
        if isinstance(face, SupportsLora):
            told = f"{TASK_PREFIX}{number}"
            return Adapter(model, number, told) if told in face.list_loras() else None
        by_number = face is None and takes_adapter_number(model.signature)
        return Adapter(model, number, number) if by_number else None

    def _of_file(self, model: Model) -> dict[str, str]:
        found = self._files.get(model)
        if found is None:
            found = self._files[model] = _read(model.version_directory / _FILE)
        return found


def _read(path: Path) -> dict[str, str]:
    """What a model is told, by the names in a file; nothing for one that is not there or cannot be used."""
    try:
        content = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        logger.error("%s cannot be read: %s", path, error)
        return {}
    if not isinstance(content, dict):
        logger.error("%s must hold an object of names", path)
        return {}
    return {name: _told(name, value) for name, value in content.items()}


def _told(name: str, value: Any) -> str:
    return str(value) if isinstance(value, int) else name
