"""SentencePiece's BPE ("llama") in GGUF files: tokens with scores instead of merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from neso.engine.text.errors import TokenizerError
from neso.engine.weights.gguf.metadata import Metadata

_SPACE = "▁"


def sentencepiece_backend(
    metadata: Metadata, vocab: Mapping[str, int], pieces: Sequence[str], unknown: str | None
) -> Backend:
    """The tokenizer of `vocab`, without its added tokens. Raises `TokenizerError`.

    `pieces`: the tokens that are made by merging, unlike control tokens, bytes and padding.
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
    """Merges in the order in which SentencePiece would make them: pieces of the highest score first.

    As `transformers` does it. Where scores are equal (some converters write none), the ids decide: trainers
    number pieces in the order of their merges. Of several ways to the same piece, the one with the longer left part
    comes first.
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
