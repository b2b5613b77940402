"""Tokenizer files of a model: vocabulary, special tokens, generation config, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend


class TokenizerError(ValueError):
    """The tokenizer files of a model are missing or invalid. The message names the file and suggests a fix."""


_CONVERT_HINT = (
    'convert it once with `python -c "from transformers import AutoTokenizer as T; '
    "T.from_pretrained('{directory}').save_pretrained('{directory}')\"` "
    "(needs: pip install transformers sentencepiece protobuf)"
)


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of the files of a model directory; a missing file is an empty mapping.

    Readers of other formats set the same fields.
    """

    backend: Backend
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Jinja source by name: "default", and optionally "tool_use" for requests with tools."""
    adds_bos_eos: tuple[bool, bool] | None = None
    """Whether the first and the last special token are added to texts; None: the post-processor of `backend` says."""

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Read the files of `directory`. Raises `TokenizerError` for a missing tokenizer or a corrupt file.

        Without a tokenizer.json, the SentencePiece model in tokenizer.model is converted.
        """
        tokenizer_json, sentencepiece = directory / "tokenizer.json", directory / "tokenizer.model"
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        adds_bos_eos: tuple[bool, bool] | None = None
        if tokenizer_json.is_file():
            backend = _load_backend(tokenizer_json)
        elif sentencepiece.is_file():
            from neso.engine.text.sentencepiece_tokenizer import read_sentencepiece  # lazy: rarely needed

            legacy = tokenizer_config.get("legacy") is not False
            backend, roles = read_sentencepiece(sentencepiece, legacy=legacy)
            tokenizer_config = {**roles, **tokenizer_config}
            # The defaults of Llama's tokenizer in `transformers`.
            adds_bos_eos = (
                tokenizer_config.get("add_bos_token", True) is True,
                tokenizer_config.get("add_eos_token", False) is True,
            )
        else:
            raise TokenizerError(_why_missing(directory))
        return cls(
            backend=backend,
            adds_bos_eos=adds_bos_eos,
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
    for name in ("spiece.model", "sentencepiece.bpe.model"):
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
    """Return the templates by name: from chat_template.jinja, else tokenizer_config.json, else chat_template.json.

    The order is that of `transformers`, which uses chat_template.json for processors of multimodal models.
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
    """Return the templates of a `chat_template` field: one string, a list of {"name", "template"}, or a mapping."""
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


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a model: their texts by name ("bos_token", …), and the ids that the engine needs.

    `eos_ids` is the union of the ids in the tokenizer, generation_config.json and config.json, in this order: a chat
    model often ends a turn with a different token than a document.
    """

    texts: Mapping[str, str]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None

    @classmethod
    def resolve(cls, files: TokenizerFiles, token_to_id: Callable[[str], int | None]) -> SpecialTokens:
        """Read texts from the tokenizer files, and ids from these texts or else from the model's files."""
        texts = special_token_texts(files)

        def ids(name: str) -> tuple[int, ...]:
            text = texts.get(f"{name}_token")
            own = None if text is None else token_to_id(text)
            key = f"{name}_token_id"
            # Multimodal models keep the fields of their language model in `text_config`.
            nested = files.config.get("text_config")
            config = files.config if key in files.config or not isinstance(nested, dict) else nested
            return _unique(own, files.generation_config.get(key), config.get(key))

        return cls(
            texts=texts,
            bos_id=next(iter(ids("bos")), None),
            eos_ids=ids("eos"),
            pad_id=next(iter(ids("pad")), None),
        )


def special_token_texts(files: TokenizerFiles) -> dict[str, str]:
    """Return the texts of the named special tokens: "bos_token", "eos_token", … and model-specific names.

    As in `transformers`, special_tokens_map.json takes precedence over tokenizer_config.json, unless the latter has
    `added_tokens_decoder`: versions that write it ignore the former.
    """
    merged = dict(files.tokenizer_config)
    if "added_tokens_decoder" not in merged:
        merged.update(files.special_tokens_map)
    extra = merged.get("extra_special_tokens")
    if isinstance(extra, dict):
        merged.update(extra)
    texts = {name: token_text(value) for name, value in merged.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def token_text(value: Any) -> str | None:
    """Return the text of a token that is configured as a string or as {"content": …}; None for anything else."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _unique(*values: Any) -> tuple[int, ...]:
    """Return the distinct token ids among numbers and lists of numbers. Some configurations write -1 for none."""
    flat: list[Any] = []
    for value in values:
        flat.extend(value if isinstance(value, Iterable) and not isinstance(value, str) else [value])
    return tuple(dict.fromkeys(v for v in flat if isinstance(v, int) and not isinstance(v, bool) and v >= 0))
