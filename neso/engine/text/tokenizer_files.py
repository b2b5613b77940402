"""What the files of a model say about its text: the tokenizer, configurations and chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from neso.engine.text.errors import TokenizerError

_CONVERT_HINT = (
    'convert it once with `python -c "from transformers import AutoTokenizer as T; '
    "T.from_pretrained('{directory}').save_pretrained('{directory}')\"` "
    "(needs: pip install transformers sentencepiece protobuf)"
)


@dataclass(frozen=True)
class TokenizerFiles:
    """What a model directory says, by its files; a file that is not there is an empty mapping.

    Models in other formats fill in the same fields.
    """

    backend: Backend
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Jinja source by name. The usual one is "default"; "tool_use" is taken for requests with tools."""

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Read the files of `directory`. Raises `TokenizerError` for a missing tokenizer, a corrupt file."""
        tokenizer_json = directory / "tokenizer.json"
        if not tokenizer_json.is_file():
            raise TokenizerError(_why_missing(directory))
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        return cls(
            backend=_load_backend(tokenizer_json),
            tokenizer_config=tokenizer_config,
            special_tokens_map=_read_json(directory / "special_tokens_map.json"),
            generation_config=_read_json(directory / "generation_config.json"),
            config=_read_json(directory / "config.json"),
            chat_templates=_read_chat_templates(directory, tokenizer_config),
        )


def _load_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _why_missing(directory: Path) -> str:
    path = directory / "tokenizer.json"
    if not directory.is_dir():
        return f"{path}: there is no directory {directory}"
    hint = _CONVERT_HINT.format(directory=directory)
    for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"):
        if (directory / name).is_file():
            return (
                f"{path} is missing; {directory / name} is a SentencePiece model, which is not read: {hint}"
            )
    if (directory / "vocab.json").is_file() or (directory / "vocab.txt").is_file():
        return f"{path} is missing; there are files of an older tokenizer format, which are not read: {hint}"
    return f"{path} is missing"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _read_chat_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: those in files of their own, else tokenizer_config.json, else chat_template.json.

    The order is that of `transformers`; chat_template.json belongs to processors of multimodal models there.
    """
    files: dict[str, str] = {}
    if (default := _read_text(directory / "chat_template.jinja")) is not None:
        files["default"] = default
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        files[path.stem] = _read_text(path) or ""
    if files:
        return files
    where = directory / "tokenizer_config.json"
    if templates := _named_templates(tokenizer_config.get("chat_template"), where):
        return templates
    where = directory / "chat_template.json"
    return _named_templates(_read_json(where).get("chat_template"), where)


def _named_templates(value: Any, where: Path) -> dict[str, str]:
    """Templates of a `chat_template` field: one string, a list of {"name", "template"}, or a mapping."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        named = value if isinstance(value, dict) else {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        named = None
    if named is None or not all(isinstance(x, str) for pair in named.items() for x in pair):
        raise TokenizerError(f"{where}: chat_template must be a string or a list of named strings")
    return dict(named)
