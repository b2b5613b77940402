"""GGUF tokenizers, compared with the tokenizer.json that they were converted from."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from gguf_files import finish, write_tokenizer
from small_tokenizers import BYTE_TOKENS, CORPUS, byte_level_backend, llama_backend, write_directory
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN_2

from neso.engine.text.gguf_tokenizer import PRE_TOKENIZERS
from neso.engine.text.tokenizer import Tokenizer
from neso.engine.text.tokenizer_files import TokenizerError

LLAMA_3 = TikTokenConverter().pattern
TEXTS = [
    *CORPUS,
    "",
    " ",
    "Hello world",
    "  the  quick\n\n brown \t\n",
    "I'LL say 1234567 don't",
    "cafe\u0301 é",  # one composed, one decomposed
    "<s>Hello</s> <|eot|>x<|begin|> y",
    "<think>a日本 語 b",
    "ends with spaces   ",
]
BYTE_LEVEL_ROLES = {"bos": 0, "eos": 1}
LLAMA_ROLES = {"unk": 0, "bos": 1, "eos": 2}

Edit = Callable[[GGUFWriter], None]


def write(path: Path, backend: Backend, *, edit: Edit = lambda writer: None, **options: Any) -> Path:
    """Write a GGUF file with only a tokenizer."""
    writer = GGUFWriter(path / "tokenizer.gguf", "llama")
    write_tokenizer(writer, json.loads(backend.to_str()), **options)
    edit(writer)
    return finish(writer)


def trained(
    pattern: str | None, *, nfc: bool = False, digits: bool = False, ignore_merges: bool = False
) -> Backend:
    """Return a byte-level tokenizer in the format of a family's tokenizer.json."""
    backend = Backend(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*CORPUS, "1234567 don't I'LL 1234567"] * 3, trainer)
    backend.add_tokens(["<think>", "日本 語"])
    return backend


def sentencepiece() -> Backend:
    """Convert as `transformers` converts a SentencePiece model: all merges that give a piece, ordered by score."""
    raw = json.loads(llama_backend(bos=False).to_str())
    vocab = raw["model"]["vocab"]
    normal = {name: i for name, i in vocab.items() if name not in BYTE_TOKENS and i > 2}
    raw["model"]["merges"] = generate_merges(normal, {name: -float(i) for name, i in normal.items()})
    return Backend.from_str(json.dumps(raw))


def assert_same_tokens(ours: Tokenizer, theirs: Backend) -> None:
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False), (
            text
        )
        assert ours.decode(ids) == theirs.decode(ids), text


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-2": {"pattern": None},
    "llama-bpe": {"pattern": LLAMA_3, "ignore_merges": True},
    "smaug-bpe": {"pattern": LLAMA_3},
    "qwen2": {"pattern": QWEN_2, "nfc": True},
    "deepseek-r1-qwen": {"pattern": QWEN_2},
    "smollm": {"pattern": None, "digits": True},
}


@pytest.mark.parametrize("pre", FAMILIES)
def test_byte_level_families(tmp_path: Path, pre: str) -> None:
    theirs = trained(**FAMILIES[pre])
    ours = Tokenizer.from_gguf(write(tmp_path, theirs, pre=pre, roles=BYTE_LEVEL_ROLES))
    assert_same_tokens(ours, theirs)
    assert ours.vocab_size == theirs.get_vocab_size()


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("tekken", "HelloWorld 123", ["Hello", "World", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "HelloWorld 1234", ["HelloWorld", "Ġ", "123", "4"]),
        ("qwen2", "HelloWorld 123", ["HelloWorld", "Ġ", "1", "2", "3"]),
        ("gpt-2", "HelloWorld 1234", ["HelloWorld", "Ġ1234"]),
        ("smollm", "HelloWorld 123", ["HelloWorld", "Ġ", "1", "2", "3"]),
    ],
)
def test_pre_tokenization(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(write(tmp_path, byte_level_backend(), pre=pre))
    splits = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [word for word, _ in splits] == words


@pytest.mark.parametrize("pre", [None, "default"])
def test_missing_pre_tokenizer_is_gpt_2_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pre: str | None
) -> None:
    theirs = byte_level_backend()
    with caplog.at_level(logging.WARNING):
        ours = Tokenizer.from_gguf(write(tmp_path, theirs, pre=pre))
    assert "tokenizer.ggml.pre" in caplog.text
    assert_same_tokens(ours, theirs)


@pytest.mark.parametrize("prefix", [None, True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool | None) -> None:
    theirs = sentencepiece()
    if prefix is False:
        theirs.normalizer = normalizers.Replace(" ", "▁")
        theirs.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]  # type: ignore[list-item]
        )
    path = write(
        tmp_path,
        theirs,
        model="llama",
        pre="default",
        roles=LLAMA_ROLES,
        edit=lambda w: None if prefix is None else w.add_add_space_prefix(prefix),
    )
    ours = Tokenizer.from_gguf(path)
    assert_same_tokens(ours, theirs)
    assert ours.encode("Hello") == [1, *theirs.encode("Hello").ids], "a begin token is the default"


def test_equal_scores_are_ordered_by_id(tmp_path: Path) -> None:
    theirs = sentencepiece()
    count = theirs.get_vocab_size()
    path = write(
        tmp_path,
        theirs,
        model="llama",
        roles=LLAMA_ROLES,
        edit=lambda w: w.add_token_scores([-1000.0] * count),
    )
    assert_same_tokens(Tokenizer.from_gguf(path), theirs)


def test_same_as_the_directory(tmp_path: Path) -> None:
    """BOS and EOS, roles and templates, in addition to the tokens."""
    backend, template = llama_backend(), "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}
    theirs = Tokenizer.from_directory(
        write_directory(tmp_path / "directory", backend, tokenizer_config=config)
    )
    path = write(tmp_path, backend, model="llama", roles=LLAMA_ROLES, template=template)
    ours = Tokenizer.from_model(path)
    assert ours.special_tokens == theirs.special_tokens
    assert ours.encode("Hello") == theirs.encode("Hello")
    assert ours.encode("Hello", add_special_tokens=False) == theirs.encode("Hello", add_special_tokens=False)
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages) == "Hello</s>"
    assert Tokenizer.from_model(tmp_path / "directory").special_tokens == theirs.special_tokens


@pytest.mark.parametrize(
    ("pre", "add_bos", "add_eos", "begin", "end"),
    [
        ("gpt-2", None, None, [], []),
        ("llama-bpe", None, None, [0], []),
        ("llama-bpe", False, None, [], []),
        ("gpt-2", True, True, [0], [1]),
    ],
)
def test_bos_and_eos(
    tmp_path: Path, pre: str, add_bos: bool | None, add_eos: bool | None, begin: list[int], end: list[int]
) -> None:
    def edit(writer: GGUFWriter) -> None:
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)
        if add_eos is not None:
            writer.add_add_eos_token(add_eos)

    tokenizer = Tokenizer.from_gguf(
        write(tmp_path, byte_level_backend(), pre=pre, roles=BYTE_LEVEL_ROLES, edit=edit)
    )
    inner = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*begin, *inner, *end]


def test_end_tokens_by_id_and_by_name(tmp_path: Path) -> None:
    backend = byte_level_backend()  # <|begin|>, <|end|>, <|eot|>
    backend.add_special_tokens(["<|im_end|>", "<|other|>"])
    backend.add_tokens(["<|endoftext|>"])  # plain text that resembles one
    path = write(tmp_path, backend, roles={"eos": 0, "eot": 2})
    expected = [0, 2, 1, backend.token_to_id("<|im_end|>")]
    assert Tokenizer.from_gguf(path).eos_token_ids == tuple(expected)


def test_named_templates(tmp_path: Path) -> None:
    choices = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    path = write(tmp_path, byte_level_backend(), edit=lambda w: w.add_chat_template(choices))
    tokenizer = Tokenizer.from_gguf(path)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == "plain"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.apply_chat_template(messages, tools=tools) == "tools"


def test_ids_outside_the_vocabulary_and_unnamed_tokens(tmp_path: Path) -> None:
    backend = byte_level_backend()
    count = backend.get_vocab_size()

    def edit(writer: GGUFWriter) -> None:
        tokens = [backend.id_to_token(i) for i in range(count)]
        writer.add_token_list([*tokens, "", ""])
        writer.add_token_types([1] * (count + 2))

    path = write(tmp_path, backend, roles={"bos": 2**32 - 1, "eos": 5}, edit=edit)
    tokenizer = Tokenizer.from_gguf(path)
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == (5,)
    assert tokenizer.vocab_size == count + 2


def test_all_families(tmp_path: Path) -> None:
    for pre in PRE_TOKENIZERS:
        tokenizer = Tokenizer.from_gguf(write(tmp_path, byte_level_backend(), pre=pre))
        assert (
            tokenizer.decode(tokenizer.encode("Hello 42 wörld", add_special_tokens=False)) == "Hello 42 wörld"
        )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_tokenizer_model("rwkv"), "tokenizer.ggml.model 'rwkv'"),
        (lambda w: w.add_tokenizer_pre("klingon"), "tokenizer.ggml.pre 'klingon'.*llama-bpe"),
        (lambda w: w.add_token_merges(["ab"]), "merges: 'ab'"),
        (lambda w: w.add_token_merges(["a qqq"]), "merges cannot be used"),
        (lambda w: w.add_uint32("tokenizer.ggml.merges", 1), "merges' must be an array of strings"),
        (lambda w: w.add_token_types([1, 2]), "token_type' must be an array of"),
        (lambda w: w.add_token_list(["a", "b", "a"]), "token_type' must be"),
        (
            lambda w: (w.add_token_list(["a", "b", "a"]), w.add_token_types([1, 1, 1])),
            "'a' is duplicated, as 0 and 2",
        ),
        (lambda w: (w.add_add_bos_token(True), w.add_bos_token_id(10**6)), "add_bos_token is true"),
        (lambda w: w.add_array("tokenizer.chat_templates", ["lost"]), "chat_template.lost' is missing"),
    ],
)
def test_invalid_tokenizers(tmp_path: Path, edit: Edit, message: str) -> None:
    path = write(tmp_path, byte_level_backend(), edit=edit)
    with pytest.raises(TokenizerError, match=rf"tokenizer\.gguf.*{message}"):
        Tokenizer.from_gguf(path)


def test_wrong_number_of_scores(tmp_path: Path) -> None:
    path = write(tmp_path, sentencepiece(), model="llama", edit=lambda w: w.add_token_scores([1.0, 2.0]))
    with pytest.raises(TokenizerError, match=r"scores' must be an array of \d+ numbers"):
        Tokenizer.from_gguf(path)


def test_missing_tokenizer_and_invalid_file(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "none.gguf", "llama")
    with pytest.raises(TokenizerError, match=r"none\.gguf.*tokenizer\.ggml\.tokens"):
        Tokenizer.from_model(finish(writer))
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(TokenizerError, match=r"text\.gguf: not a GGUF file"):
        Tokenizer.from_model(tmp_path / "text.gguf")
