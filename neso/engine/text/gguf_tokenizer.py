"""Converts tokenizers in the metadata of GGUF files to Hugging Face's `tokenizers`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy.typing as npt
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from neso.engine.text.tokenizer_files import TokenizerError, TokenizerFiles
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

# Control tokens that end a turn or a text. A file names only one of them, but models have several; llama.cpp also
# identifies them by name.
_END_TOKENS = frozenset(
    "</s> <|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <EOT>".split()
)


class TokenType(IntEnum):
    """SentencePiece's token types, as numbered by ggml."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, and the type of each."""

    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, metadata: Metadata) -> Vocabulary:
        # Some files have tokens with an empty name; the library needs distinct names.
        tokens = [
            token or f"[EMPTY_{index}]" for index, token in enumerate(metadata.strings(f"{_PREFIX}tokens"))
        ]
        types = metadata.numbers(f"{_PREFIX}token_type", len(tokens))
        return cls(tokens, [TokenType.NORMAL] * len(tokens) if types is None else types.tolist())

    def ids(self, metadata: Metadata) -> dict[str, int]:
        """Return the token ids by name. Raises `TokenizerError` for a duplicate token."""
        ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            if ids.setdefault(token, token_id) != token_id:
                raise TokenizerError(
                    f"{metadata.path}: {_PREFIX}tokens: {token!r} is duplicated, as {ids[token]} and {token_id}"
                )
        return ids

    def of_type(self, *types: TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]


def read_gguf_tokenizer(path: Path) -> TokenizerFiles:
    """Return the equivalent of the model's tokenizer.json and tokenizer_config.json.

    Raises `TokenizerError` with the file and the metadata key.
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
        tokenizer_config=roles,
        adds_bos_eos=(_adds(metadata, "bos", roles, add_bos), _adds(metadata, "eos", roles, False)),
        generation_config={"eos_token_id": _end_ids(metadata, vocabulary)},
        chat_templates=_chat_templates(metadata),
    )


def _role_texts(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, str]:
    """Return the texts of the special tokens by role; ids outside the vocabulary are ignored."""
    ids = {role: metadata.integer(_PREFIX + key, -1) for role, key in _ROLES.items()}
    if ids["unk_token"] == -1 and TokenType.UNKNOWN in vocabulary.types:
        ids["unk_token"] = vocabulary.types.index(TokenType.UNKNOWN)
    tokens = vocabulary.tokens
    return {role: tokens[token_id] for role, token_id in ids.items() if 0 <= token_id < len(tokens)}


def _adds(metadata: Metadata, name: str, roles: dict[str, str], default: bool) -> bool:
    """Whether the token is added to texts."""
    key = f"{_PREFIX}add_{name}_token"
    known = f"{name}_token" in roles
    adds = metadata.boolean(key, default and known)
    if adds and not known:
        raise TokenizerError(f"{metadata.path}: {key} is true, but {_PREFIX}{name}_token_id names no token")
    return adds


def _add_tokens(backend: Backend, vocabulary: Vocabulary) -> None:
    """Register the tokens that are matched before a text is split."""
    special = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    plain = vocabulary.of_type(TokenType.USER_DEFINED)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _end_ids(metadata: Metadata, vocabulary: Vocabulary) -> list[int]:
    named = [metadata.integer(f"{_PREFIX}{name}_token_id", -1) for name in ("eos", "eot", "eom")]
    ends = [
        token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == TokenType.CONTROL and token in _END_TOKENS
    ]
    return [token_id for token_id in dict.fromkeys(named + ends) if 0 <= token_id < len(vocabulary.tokens)]


def _chat_templates(metadata: Metadata) -> dict[str, Any]:
    templates = {"default": metadata.string(_TEMPLATE)} if _TEMPLATE in metadata else {}
    for name in metadata.strings("tokenizer.chat_templates", []):
        templates[name] = metadata.string(f"{_TEMPLATE}.{name}")
    return templates


logger = logging.getLogger(__name__)

MERGES_KEY = "tokenizer.ggml.merges"
PRE_KEY = "tokenizer.ggml.pre"


@dataclass(frozen=True)
class PreTokenizer:
    """Pre-tokenization and normalization of a model family, from its tokenizer.json.

    `pattern` None is GPT-2's. `ignore_merges`: a word that is a token as a whole is not split.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2_PATTERN = _LLAMA_3_PATTERN.replace("{1,3}", "")
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT_2 = PreTokenizer()
_LLAMA_3 = PreTokenizer(_LLAMA_3_PATTERN, ignore_merges=True, add_bos=True)
_SMOLLM = PreTokenizer(single_digits=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT_2,
    "phi-2": _GPT_2,
    "olmo": _GPT_2,
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "smaug-bpe": PreTokenizer(_LLAMA_3_PATTERN),
    "dbrx": PreTokenizer(_LLAMA_3_PATTERN),
    "qwen2": PreTokenizer(_QWEN_2_PATTERN, nfc=True),
    "megrez": PreTokenizer(_QWEN_2_PATTERN, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN_2_PATTERN),
    "tekken": PreTokenizer(_TEKKEN_PATTERN, ignore_merges=True, add_bos=True),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
}


def pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    """Return the pre-tokenizer named by the file. Raises `TokenizerError` for an unsupported one."""
    name = metadata.string(PRE_KEY, "default")
    if name == "default":
        logger.warning(
            "%s: %s is missing; using GPT-2's pre-tokenizer, which can give other tokens than in training",
            metadata.path,
            PRE_KEY,
        )
        return _GPT_2
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{metadata.path}: {PRE_KEY} {name!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def byte_level_backend(metadata: Metadata, vocab: Mapping[str, int], pre: PreTokenizer) -> Backend:
    """Create a byte-level BPE tokenizer ("gpt2": tokens and merges) without added tokens. Raises `TokenizerError`."""
    merges = [_split_merge(merge, metadata) for merge in metadata.strings(MERGES_KEY)]
    try:
        model = models.BPE(vocab=dict(vocab), merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{metadata.path}: {MERGES_KEY} cannot be used: {error}") from error
    backend = Backend(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _split_merge(merge: str, metadata: Metadata) -> tuple[str, str]:
    # The first character can itself be a space.
    left, right = merge[: (at := merge.find(" ", 1))], merge[at + 1 :]
    if at < 1 or not right:
        raise TokenizerError(
            f"{metadata.path}: {MERGES_KEY}: {merge!r} is not two tokens with a space between"
        )
    return left, right


_SPACE = "▁"


def sentencepiece_backend(
    metadata: Metadata, vocab: Mapping[str, int], pieces: Sequence[str], unknown: str | None
) -> Backend:
    """Create a SentencePiece BPE tokenizer ("llama": tokens with scores) without added tokens.

    Raises `TokenizerError`. `pieces`: the tokens that result from merges, without control tokens, bytes and padding.
    """
    scores = metadata.numbers("tokenizer.ggml.scores", len(metadata.strings("tokenizer.ggml.tokens")))
    merges = merges_from_scores({piece: vocab[piece] for piece in pieces}, scores)
    try:
        model = models.BPE(
            vocab=dict(vocab), merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{metadata.path}: the tokens cannot be used: {error}") from error
    backend = Backend(model)
    spaced = metadata.boolean("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([*([normalizers.Prepend(_SPACE)] if spaced else []), replace])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if spaced else [])])
    return backend


def merges_from_scores(pieces: Mapping[str, int], scores: npt.NDArray[Any] | None) -> list[tuple[str, str]]:
    """Return merges in SentencePiece's order, pieces with the highest score first, as in `transformers`.

    Equal scores (some converters write none) are ordered by id, because trainers number pieces in the order of their
    merges. Among merges that produce the same piece, the one with the longer left part is first.
    """
    ranked = []
    for piece, token_id in pieces.items():
        score = 0.0 if scores is None else float(scores[token_id])
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-score, token_id, -cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
