"""Converts SentencePiece models (`tokenizer.model`) to Hugging Face's `tokenizers`.

The file is a protobuf message, `ModelProto` of https://github.com/google/sentencepiece; only the fields below are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message,
    message_factory,
)
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from neso.engine.text.gguf_tokenizer import TokenType, merges_from_scores
from neso.engine.text.tokenizer_files import TokenizerError

_UNIGRAM, _BPE = 1, 2  # model_type
_SPACE = "▁"
_ROLES = {"unk_token": "unk_id", "bos_token": "bos_id", "eos_token": "eos_id", "pad_token": "pad_id"}

_Field = descriptor_pb2.FieldDescriptorProto
# Message: field: number, type, default.
_MESSAGES: dict[str, dict[str, tuple[int, Any, str]]] = {
    "Piece": {
        "piece": (1, _Field.TYPE_STRING, ""),
        "score": (2, _Field.TYPE_FLOAT, "0"),
        "type": (3, _Field.TYPE_INT32, str(int(TokenType.NORMAL))),
    },
    "TrainerSpec": {
        "model_type": (3, _Field.TYPE_INT32, str(_UNIGRAM)),
        "byte_fallback": (35, _Field.TYPE_BOOL, "false"),
        "unk_id": (40, _Field.TYPE_INT32, "0"),
        "bos_id": (41, _Field.TYPE_INT32, "1"),
        "eos_id": (42, _Field.TYPE_INT32, "2"),
        "pad_id": (43, _Field.TYPE_INT32, "-1"),
    },
    "NormalizerSpec": {
        "precompiled_charsmap": (2, _Field.TYPE_BYTES, ""),
        "add_dummy_prefix": (3, _Field.TYPE_BOOL, "true"),
        "remove_extra_whitespaces": (4, _Field.TYPE_BOOL, "true"),
        "escape_whitespaces": (5, _Field.TYPE_BOOL, "true"),
    },
    "Model": {
        "pieces": (1, "Piece", ""),
        "trainer_spec": (2, "TrainerSpec", ""),
        "normalizer_spec": (3, "NormalizerSpec", ""),
    },
}


def read_sentencepiece(path: Path, *, legacy: bool = True) -> tuple[Backend, dict[str, str]]:
    """Return the tokenizer of a SentencePiece model, and the texts of its special tokens by role ("bos_token", …).

    Each part of a text between special tokens gets SentencePiece's token ids. Without `legacy`, a space is only put
    before the first part, and not if it starts with one, as `transformers` does for models whose tokenizer_config.json
    has `"legacy": false`. Raises `TokenizerError` with the file.
    """
    model = _read(path)
    trainer = model.trainer_spec
    tokens = [piece.piece for piece in model.pieces]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if not tokens or len(vocab) != len(tokens):
        raise TokenizerError(f"{path} has no pieces, or one of them twice")
    if not model.normalizer_spec.escape_whitespaces:
        raise TokenizerError(f"{path}: models without escape_whitespaces are not supported")
    try:
        if trainer.model_type == _BPE:
            backend = Backend(_bpe(model, vocab))
        elif trainer.model_type == _UNIGRAM:
            scored = [(piece.piece, piece.score) for piece in model.pieces]
            backend = Backend(models.Unigram(scored, trainer.unk_id, trainer.byte_fallback))
        else:
            raise TokenizerError(
                f"{path}: model_type {trainer.model_type} is not supported; BPE and unigram are"
            )
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path}: the pieces cannot be used: {error}") from error
    _set_steps(backend, model, legacy)
    _add_tokens(backend, model)
    ids = {role: getattr(trainer, field) for role, field in _ROLES.items()}
    return backend, {role: tokens[id] for role, id in ids.items() if 0 <= id < len(tokens)}


def _bpe(model: Any, vocab: Mapping[str, int]) -> models.BPE:
    pieces = {piece.piece: vocab[piece.piece] for piece in model.pieces if piece.type == TokenType.NORMAL}
    scores = np.array([piece.score for piece in model.pieces], np.float64)
    unknown = next((piece.piece for piece in model.pieces if piece.type == TokenType.UNKNOWN), None)
    return models.BPE(
        vocab=dict(vocab),
        merges=merges_from_scores(pieces, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _set_steps(backend: Backend, model: Any, legacy: bool) -> None:
    """Set the normalizer, the pre-tokenizer and the decoder."""
    spec = model.normalizer_spec
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if legacy:
        prepend = [normalizers.Prepend(_SPACE)] if spec.add_dummy_prefix else []
        steps += [*prepend, normalizers.Replace(" ", _SPACE)]
    else:
        prefix = "first" if spec.add_dummy_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prefix, split=False)
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    decode: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        decode.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decode)


def _add_tokens(backend: Backend, model: Any) -> None:
    """Register the tokens that are matched before a text is split."""
    special = [p.piece for p in model.pieces if p.type in (TokenType.CONTROL, TokenType.UNKNOWN)]
    plain = [p.piece for p in model.pieces if p.type == TokenType.USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _read(path: Path) -> Any:
    model = _model_class()()
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, message.DecodeError) as error:
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from None
    return model


@cache
def _model_class() -> Any:
    """Return the class of `ModelProto` with the fields of `_MESSAGES`; others are skipped."""
    package = "neso.sentencepiece"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto2")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for field, (number, kind, default) in fields.items():
            label = _Field.LABEL_REPEATED if field == "pieces" else _Field.LABEL_OPTIONAL
            added = described.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                added.type, added.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                added.type, added.default_value = kind, default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Model"))
