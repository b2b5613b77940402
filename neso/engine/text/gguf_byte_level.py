"""Byte-level BPE ("gpt2") in GGUF files: tokens and merges, and the name of the way to split text before."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from neso.engine.text.errors import TokenizerError
from neso.engine.weights.gguf.metadata import Metadata

logger = logging.getLogger(__name__)

MERGES_KEY = "tokenizer.ggml.merges"
PRE_KEY = "tokenizer.ggml.pre"


@dataclass(frozen=True)
class PreTokenizer:
    """How the tokenizer.json of a family splits and normalizes text, and its defaults.

    `pattern` None is GPT-2's. `ignore_merges`: a whole word that is a token becomes it at once.
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
    """The one that the file names. Raises `TokenizerError` for one that is not known."""
    name = metadata.string(PRE_KEY, "default")
    if name == "default":
        logger.warning(
            "%s: %s does not say how the tokenizer splits text; it is split as GPT-2 does, which may give "
            "other tokens than the model was trained with",
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
    """The tokenizer of `vocab`, without its added tokens. Raises `TokenizerError`."""
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
    # The first character may itself be a space.
    left, right = merge[: (at := merge.find(" ", 1))], merge[at + 1 :]
    if at < 1 or not right:
        raise TokenizerError(
            f"{metadata.path}: {MERGES_KEY}: {merge!r} is not two tokens with a space between"
        )
    return left, right
