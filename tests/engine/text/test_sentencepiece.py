"""tokenizer.model without a tokenizer.json, compared with SentencePiece itself."""

from __future__ import annotations

import inspect
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from neso.engine.text.tokenizer import Tokenizer
from neso.engine.text.tokenizer_files import TokenizerError

spm = pytest.importorskip("sentencepiece")

# Without rulers: a unigram model has several segmentations of them with the same score.
CORPUS = [
    line.strip()
    for module in (logging, random, inspect)
    for line in inspect.getsource(module).split("\n")
    if "---" not in line and "===" not in line
]
TEXTS = (
    "Hello world",
    "  two  spaces   and\ta tab\n\nlines ",
    "def f(x):\n    return x + 1",
    "日本語 and emoji 🎉",
    "naïve café ﬁn",
    "x",
    "",
)
KINDS: dict[str, dict[str, Any]] = {
    # As Llama 2 and Mistral were trained.
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
    },
    # As Gemma: without the space before a text.
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
    },
    "bpe without bytes": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "unigram without bytes": {"model_type": "unigram"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory with a tokenizer.model for each of KINDS."""
    directories = {}
    for kind, options in KINDS.items():
        directory = tmp_path_factory.mktemp("model")
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_prefix=str(directory / "tokenizer"),
            vocab_size=700,
            user_defined_symbols=["<|tool|>"],
            minloglevel=2,
            **options,
        )
        directories[kind] = directory
    return directories


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_equal_sentencepiece(trained: dict[str, Path], kind: str) -> None:
    reference = spm.SentencePieceProcessor(model_file=str(trained[kind] / "tokenizer.model"))
    tokenizer = Tokenizer.from_directory(trained[kind])
    rng = random.Random(0)
    samples = [" ".join(rng.sample(CORPUS, 3)) for _ in range(50)]
    for text in (*TEXTS, *samples):
        ids = reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        if kind in ("llama", "gemma"):  # the others do not keep the text
            assert tokenizer.decode(ids) == text
        else:
            known = [token_id for token_id in ids if token_id != reference.unk_id()]
            assert tokenizer.decode(ids).strip() == reference.decode(known).strip()


def test_special_tokens(trained: dict[str, Path]) -> None:
    reference = spm.SentencePieceProcessor(model_file=str(trained["llama"] / "tokenizer.model"))
    tokenizer = Tokenizer.from_directory(trained["llama"])
    assert tokenizer.encode("Hi") == [reference.bos_id(), *reference.encode("Hi")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode("<s>", add_special_tokens=False) == [1]
    symbol = reference.piece_to_id("<|tool|>")
    assert symbol in tokenizer.encode("a<|tool|>b")


@pytest.mark.parametrize(
    ("config", "begin", "end"),
    [
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
    ],
)
def test_tokenizer_config_says_what_is_added(
    trained: dict[str, Path], tmp_path: Path, config: dict[str, bool], begin: list[int], end: list[int]
) -> None:
    (tmp_path / "tokenizer.model").write_bytes((trained["llama"] / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    plain = tokenizer.encode("Hello world", add_special_tokens=False)
    assert tokenizer.encode("Hello world") == [*begin, *plain, *end]


def test_legacy_models_have_a_space_after_a_special_token(trained: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((trained["llama"] / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    new, legacy = Tokenizer.from_directory(tmp_path), Tokenizer.from_directory(trained["llama"])
    after = [tokenizer.encode("<s>self", add_special_tokens=False) for tokenizer in (legacy, new)]
    assert after[0] == [1, *new.encode("self", add_special_tokens=False)]
    assert after[1] != after[0]


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    for content, reason in ((b"\n\x0e", "is not a SentencePiece model"), (b"", "has no pieces")):
        path.write_bytes(content)
        with pytest.raises(TokenizerError, match=reason):
            Tokenizer.from_directory(tmp_path)
