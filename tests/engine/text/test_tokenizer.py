"""Tokenizer, compared with `transformers`' AutoTokenizer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeDirectory
from small_tokenizers import BYTE_TOKENS, llama_backend, write_directory

from neso.engine.text.tokenizer import Tokenizer
from neso.engine.text.tokenizer_files import TokenizerError
from neso.generation import InvalidParameter, TokenizerLike

TEXTS = [
    "",
    " ",
    "Hello world",
    "  the  quick\nbrown ",
    "日本語 👨‍👩‍👧 é",
    "<s>Hello</s> <|eot|>x",
    "<think>a",
]
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def auto(path: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), **options)


def assert_same_tokens(path: Path, texts: Sequence[str] = TEXTS, **options: Any) -> None:
    ours, theirs = Tokenizer.from_directory(path, **options), auto(path, **options)
    for text in texts:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected, text
            for skip in (True, False):
                decoded = theirs.decode(expected, skip_special_tokens=skip)
                assert ours.decode(expected, skip_special_tokens=skip) == decoded, text


@pytest.mark.parametrize("style", ["byte_level", "llama", "metaspace", "wordpiece"])
def test_equals_auto_tokenizer(style: str, make_directory: MakeDirectory) -> None:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if style in ("llama", "metaspace"):
        config.update(LLAMA)
    assert_same_tokens(make_directory(style, tokenizer_config=config))


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}]
)
def test_llama_equals_auto_tokenizer(tmp_path: Path, in_file: bool, flags: dict[str, bool]) -> None:
    """With the flags in tokenizer_config.json, and with a tokenizer.json that adds <s> or does not."""
    config = {**LLAMA, **flags, "tokenizer_class": "LlamaTokenizer"}
    backend = llama_backend(bos=in_file, metaspace=True)
    assert_same_tokens(write_directory(tmp_path, backend, tokenizer_config=config))


def test_legacy_llama_files(tmp_path: Path) -> None:
    """transformers 5 replaces their normalizer by a pre-tokenizer, which differs for a space at the start.

    SentencePiece, with which these models were trained, gives two "▁" there, as tokenizer.json does.
    """
    config = {**LLAMA, "tokenizer_class": "LlamaTokenizer"}
    path = write_directory(tmp_path, llama_backend(), tokenizer_config=config)
    assert_same_tokens(path, ["", "Hello world", "the  quick\nbrown ", "日本語 👨‍👩‍👧 é"])
    space = Tokenizer.from_directory(path).encode(" ", add_special_tokens=False)
    assert Tokenizer.from_directory(path).decode(space) == " "


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    "flags",
    [{"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}],
)
def test_add_bos_and_eos_overrides(tmp_path: Path, in_file: bool, flags: dict[str, bool]) -> None:
    config = {**LLAMA, "tokenizer_class": "PreTrainedTokenizerFast"}
    assert_same_tokens(
        write_directory(tmp_path, llama_backend(bos=in_file), tokenizer_config=config), **flags
    )


def test_truncation_and_padding_of_the_file_are_disabled(make_directory: MakeDirectory) -> None:
    backend = llama_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    path = make_directory(backend, tokenizer_config=LLAMA)
    assert_same_tokens(path)


def test_special_tokens_of_the_configuration(make_directory: MakeDirectory) -> None:
    config = {"eos_token": "<|end|>", "pad_token": {"content": "<0x41>"}, "image_token": "<think>"}
    config["added_tokens_decoder"] = {"402": {"content": "<extra>", "special": True}}  # type: ignore[assignment]
    path = make_directory("byte_level", tokenizer_config=config)
    size = Tokenizer.from_directory(make_directory("byte_level", tokenizer_config={})).vocab_size
    config["added_tokens_decoder"] = {str(size): {"content": "<extra>", "special": True}}  # type: ignore[assignment]
    path = make_directory("byte_level", tokenizer_config=config)
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.encode("a<extra>") == [*tokenizer.encode("a"), size]
    assert tokenizer.decode([size]) == ""
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.pad_token_id is None  # not in this vocabulary, so not added
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == list(tokenizer.eos_token_ids)


def test_bos_and_eos_ids(make_directory: MakeDirectory) -> None:
    path = make_directory(
        "byte_level",
        tokenizer_config={"eos_token": {"content": "<|end|>", "lstrip": False}, "bos_token": "<|begin|>"},
        generation_config={"eos_token_id": [2, 1], "pad_token_id": 1},
        config={"eos_token_id": 7, "bos_token_id": 5, "pad_token_id": -1},
    )
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (1, 2, 7)
    assert tokenizer.pad_token_id == 1


def test_ids_without_tokenizer_config(make_directory: MakeDirectory) -> None:
    path = make_directory("byte_level", config={"text_config": {"eos_token_id": [3, 4], "bos_token_id": 2}})
    tokenizer = Tokenizer.from_directory(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (2, (3, 4), None)


def test_special_tokens_map(make_directory: MakeDirectory) -> None:
    """It applies unless `added_tokens_decoder` is present, as in transformers."""
    files = {"special_tokens_map": {"eos_token": {"content": "<|eot|>"}}}
    config: dict[str, Any] = {"eos_token": "<|end|>"}
    for decoder in ({}, {"added_tokens_decoder": {"0": {"content": "<|begin|>", "special": True}}}):
        path = make_directory("byte_level", tokenizer_config={**config, **decoder}, **files)
        assert Tokenizer.from_directory(path).eos_token_ids == (auto(path).eos_token_id,)


def test_encode_batch(make_directory: MakeDirectory) -> None:
    tokenizer = Tokenizer.from_directory(make_directory("llama", tokenizer_config=LLAMA))
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_invalid_unicode_is_rejected(make_directory: MakeDirectory) -> None:
    tokenizer = Tokenizer.from_directory(make_directory("llama"))
    with pytest.raises(InvalidParameter, match="prompt"):
        tokenizer.encode("a\ud800b")


def test_single_tokens(make_directory: MakeDirectory) -> None:
    llama = Tokenizer.from_directory(make_directory("llama"))
    id_of = llama.backend.token_to_id
    assert [llama.token_bytes(id_of(name)) for name in BYTE_TOKENS] == [bytes([n]) for n in range(256)]
    assert (llama.token_text(id_of("<0x41>")), llama.token_text(id_of("<0xE6>"))) == ("A", "\ufffd")
    assert (llama.token_text(1), llama.token_bytes(1)) == ("<s>", b"<s>")
    space = next(i for i in range(llama.vocab_size) if llama.backend.id_to_token(i) == "▁how")
    assert llama.token_text(space) == " how"
    byte_level = Tokenizer.from_directory(make_directory("byte_level"))
    text = "héllo 日本 語 日本\n"
    joined = b"".join(byte_level.token_bytes(i) or b"" for i in byte_level.encode(text))
    assert joined == text.encode()
    assert byte_level.token_text(byte_level.backend.token_to_id("Ġ")) == " "
    wordpiece = Tokenizer.from_directory(make_directory("wordpiece"))
    assert wordpiece.token_bytes(5) is None
    assert wordpiece.token_text(wordpiece.backend.token_to_id("[CLS]")) == "[CLS]"


def test_missing_and_corrupt_files(tmp_path: Path, make_directory: MakeDirectory) -> None:
    with pytest.raises(TokenizerError, match="nowhere"):
        Tokenizer.from_directory(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"\n\x0e")
    with pytest.raises(TokenizerError, match=r"SentencePiece.*AutoTokenizer.*save_pretrained"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)
    path = make_directory("llama", tokenizer_config=[1])
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json must hold a JSON object"):
        Tokenizer.from_directory(path)
    (path / "tokenizer_config.json").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_directory(path)


def test_implements_tokenizer_like(make_directory: MakeDirectory) -> None:
    tools: TokenizerLike = Tokenizer.from_directory(make_directory("llama"))
    assert not tools.has_chat_template
    with pytest.raises(InvalidParameter, match="no chat template"):
        tools.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("place", ["config", "named", "jinja", "json"])
def test_chat_template_files(place: str, make_directory: MakeDirectory) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    config: dict[str, Any] = {**LLAMA}
    files: dict[str, Any] = {}
    if place == "config":
        config["chat_template"] = source
    if place == "named":
        config["chat_template"] = [
            {"name": "default", "template": source},
            {"name": "tool_use", "template": "tools!"},
        ]
    if place == "json":
        files["chat_template"] = {"chat_template": source}
    path = make_directory("llama", tokenizer_config=config, **files)
    if place == "jinja":
        (path / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer.from_directory(path)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(messages) == "<s>hi"
    if place != "json":
        theirs = auto(path)
        assert theirs.apply_chat_template(messages, tokenize=False) == "<s>hi"
    if place == "named":
        tool = {"type": "function", "function": {"name": "f"}}
        assert tokenizer.apply_chat_template(messages, tools=[tool]) == "tools!"
        assert tokenizer.apply_chat_template(messages, chat_template="tool_use") == "tools!"


def test_import_is_cheap() -> None:
    code = (
        "import sys, neso.engine.text; "
        "print([m for m in ('jinja2', 'torch', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
