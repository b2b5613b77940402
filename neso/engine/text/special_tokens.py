"""Which tokens of a model have a role: begin, end, padding and the like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from neso.engine.text.tokenizer_files import TokenizerFiles


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a model: their texts by name ("bos_token", …), and the ids that the engine needs.

    `eos_ids` is the union of what the tokenizer, generation_config.json and config.json name, in this order:
    a chat model often ends a turn with another token than a document.
    """

    texts: Mapping[str, str]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None

    @classmethod
    def resolve(cls, files: TokenizerFiles, token_to_id: Callable[[str], int | None]) -> SpecialTokens:
        """Take texts from the tokenizer's files, and ids from these texts, else from the model's files."""
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
    """Texts of the named special tokens: "bos_token", "eos_token", … and names that a model adds.

    As in `transformers`: special_tokens_map.json wins over tokenizer_config.json, except where the latter has
    `added_tokens_decoder`, whose writers no longer look at the former.
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
    """Text of a token that a configuration gives as a string or as {"content": …}; None for anything else."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _unique(*values: Any) -> tuple[int, ...]:
    """Token ids among numbers and lists of numbers, each once. Some configurations say "none" as -1."""
    flat: list[Any] = []
    for value in values:
        flat.extend(value if isinstance(value, Iterable) and not isinstance(value, str) else [value])
    return tuple(dict.fromkeys(v for v in flat if isinstance(v, int) and not isinstance(v, bool) and v >= 0))
