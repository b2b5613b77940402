"""The tokenizer in the metadata of a GGUF file, put together as a Hugging Face one would be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from neso.engine.text.errors import TokenizerError
from neso.engine.text.gguf_byte_level import byte_level_backend, pre_tokenizer
from neso.engine.text.gguf_sentencepiece import sentencepiece_backend
from neso.engine.text.tokenizer_files import TokenizerFiles
from neso.engine.weights.gguf.file import GGUFFile
from neso.engine.weights.gguf.metadata import Metadata
from neso.engine.weights.source import CheckpointError

_PREFIX = "tokenizer.ggml."
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # llama.cpp's spelling
    "mask_token": "mask_token_id",
}
_TEMPLATE = "tokenizer.chat_template"

# Control tokens that end a turn or a text. A file names one end, models have several; llama.cpp knows them by
# their names, too.
_ENDS = frozenset(
    "</s> <|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <EOT>".split()
)


class TokenType(IntEnum):
    """SentencePiece's types of tokens, as ggml numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in the order of their ids, and the type of each."""

    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, metadata: Metadata) -> Vocabulary:
        # Some files have tokens without a name; no text is made of them, but each needs one of its own.
        tokens = [
            token or f"[EMPTY_{index}]" for index, token in enumerate(metadata.strings(f"{_PREFIX}tokens"))
        ]
        types = metadata.numbers(f"{_PREFIX}token_type", len(tokens))
        return cls(tokens, [TokenType.NORMAL] * len(tokens) if types is None else types.tolist())

    def ids(self, metadata: Metadata) -> dict[str, int]:
        """Raises `TokenizerError` for a token that is there twice."""
        ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            if ids.setdefault(token, token_id) != token_id:
                raise TokenizerError(
                    f"{metadata.path}: {_PREFIX}tokens: {token!r} is there twice, as {ids[token]} and {token_id}"
                )
        return ids

    def of_type(self, *types: TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]


def read_gguf_tokenizer(path: Path) -> TokenizerFiles:
    """What the tokenizer.json and tokenizer_config.json of the model would say.

    `tokenizer_config` always has "add_bos_token" and "add_eos_token". Raises `TokenizerError`, naming the file and
    the metadata key.
    """
    try:
        with GGUFFile(path) as file:
            return _read(file.metadata)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None


def _read(metadata: Metadata) -> TokenizerFiles:
    vocabulary = Vocabulary.read(metadata)
    vocab = vocabulary.ids(metadata)
    roles = _role_texts(metadata, vocabulary)
    model = metadata.string(f"{_PREFIX}model")
    if model == "gpt2":
        pre = pre_tokenizer(metadata)
        backend, add_bos = byte_level_backend(metadata, vocab, pre), pre.add_bos
    elif model == "llama":
        pieces = vocabulary.of_type(TokenType.NORMAL)
        backend = sentencepiece_backend(metadata, vocab, pieces, roles.get("unk_token"))
        add_bos = True
    else:
        raise TokenizerError(
            f"{metadata.path}: {_PREFIX}model {model!r} is not supported; supported are gpt2, llama"
        )
    _add_tokens(backend, vocabulary)
    return TokenizerFiles(
        backend=backend,
        tokenizer_config={
            **roles,
            "add_bos_token": _adds(metadata, "bos", roles, add_bos),
            "add_eos_token": _adds(metadata, "eos", roles, False),
        },
        generation_config={"eos_token_id": _end_ids(metadata, vocabulary)},
        chat_templates=_chat_templates(metadata),
    )


def _role_texts(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, str]:
    """Texts of the tokens with a role. Ids outside the vocabulary stand for none."""
    ids = {role: metadata.integer(_PREFIX + key, -1) for role, key in _ROLES.items()}
    if ids["unk_token"] == -1 and TokenType.UNKNOWN in vocabulary.types:
        ids["unk_token"] = vocabulary.types.index(TokenType.UNKNOWN)
    tokens = vocabulary.tokens
    return {role: tokens[token_id] for role, token_id in ids.items() if 0 <= token_id < len(tokens)}


def _adds(metadata: Metadata, name: str, roles: dict[str, str], default: bool) -> bool:
    """Whether the token is put around texts."""
    key = f"{_PREFIX}add_{name}_token"
    known = f"{name}_token" in roles
    adds = metadata.boolean(key, default and known)
    if adds and not known:
        raise TokenizerError(f"{metadata.path}: {key} is true, but {_PREFIX}{name}_token_id names no token")
    return adds


def _add_tokens(backend: Backend, vocabulary: Vocabulary) -> None:
    """Tokens that are found in a text before it is split."""
    special = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    plain = vocabulary.of_type(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _end_ids(metadata: Metadata, vocabulary: Vocabulary) -> list[int]:
    named = [metadata.integer(f"{_PREFIX}{name}_token_id", -1) for name in ("eos", "eot", "eom")]
    ends = [
        token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == TokenType.CONTROL and token in _ENDS
    ]
    return [token_id for token_id in dict.fromkeys(named + ends) if 0 <= token_id < len(vocabulary.tokens)]


def _chat_templates(metadata: Metadata) -> dict[str, Any]:
    templates = {"default": metadata.string(_TEMPLATE)} if _TEMPLATE in metadata else {}
    for name in metadata.strings("tokenizer.chat_templates", []):
        templates[name] = metadata.string(f"{_TEMPLATE}.{name}")
    return templates
