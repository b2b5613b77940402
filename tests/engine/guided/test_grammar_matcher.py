"""Token masks compared with the bytes of every token, for all kinds of tokenizers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_files import finish, write_tokenizer
from llguidance import LLMatcher
from small_tokenizers import BACKENDS, byte_level_backend, llama_backend
from tokenizers import Tokenizer as Backend

from neso.engine.guided.grammar import MatcherError, grammar_text
from neso.engine.guided.grammar_matcher import CompiledGrammar, GrammarMatcher, make_matcher
from neso.engine.guided.token_table import TokenTable
from neso.engine.text.tokenizer import Tokenizer
from neso.engine.text.tokenizer_files import SpecialTokens
from neso.generation import GuidedDecoding

CHOICES = ("hello world", "hello, Wörld", "日本語", "the quick", "the quiet", "the", " leading", "👍🏽 x\ny")
PADDING = 37  # rows of logits that have no token


def make_tokenizer(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, SpecialTokens({}, None, (1,), None), {})


def compile_grammar(tokenizer: Tokenizer, vocab_size: int, **guided: object) -> CompiledGrammar:
    table = TokenTable.of(tokenizer, vocab_size)
    text = grammar_text(GuidedDecoding(**guided), table.special_tokens())
    matcher, error = make_matcher(table.ll_tokenizer(), text)
    assert not error
    return CompiledGrammar(matcher, vocab_size)


def allowed(matcher: GrammarMatcher, vocab_size: int) -> set[int]:
    masks = np.zeros((1, matcher.mask_width), np.int32)
    matcher.fill(masks, 0)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return set(np.flatnonzero(bits).tolist())


def gguf_tokenizer(tmp_path: Path, backend: Backend, **options: object) -> Tokenizer:
    path = tmp_path / "tokenizer.gguf"
    writer = GGUFWriter(path, "llama")
    write_tokenizer(writer, json.loads(backend.to_str()), **options)
    finish(writer)
    return Tokenizer.from_gguf(path)


@pytest.mark.parametrize("name", ["byte_level", "llama", "metaspace", "gguf_byte_level", "gguf_llama"])
def test_masks_match_the_bytes(name: str, tmp_path: Path) -> None:
    """At each position of random walks, a token is allowed iff its bytes continue one of the choices."""
    makers: dict[str, Callable[[], Tokenizer]] = {
        "gguf_byte_level": lambda: gguf_tokenizer(tmp_path, byte_level_backend(), roles={"bos": 0, "eos": 1}),
        "gguf_llama": lambda: gguf_tokenizer(tmp_path, llama_backend(), roles={"unk": 0, "bos": 1, "eos": 2}),
    }
    tokenizer = makers[name]() if name in makers else make_tokenizer(BACKENDS[name]())
    vocab_size = tokenizer.vocab_size + PADDING
    pieces = [tokenizer.token_bytes(i) or b"" for i in range(vocab_size)]
    special = tokenizer.special_ids
    # Without a token for each character or byte, some positions have no continuation.
    single = {piece for i, piece in enumerate(pieces) if i not in special}
    choices = [c for c in CHOICES if all(x.encode() in single or byte_by_byte(x, single) for x in c)]
    assert choices
    texts = [choice.encode() for choice in choices]
    grammar = compile_grammar(tokenizer, vocab_size, choice=tuple(choices))
    ends = (1, vocab_size - 1)
    rng = random.Random(name)
    finished = set()
    for _ in range(60):
        matcher, written, complete = grammar.start(ends), b"", False
        while not complete:
            expected = {
                i
                for i, piece in enumerate(pieces)
                if piece and i not in special and any(t.startswith(written + piece) for t in texts)
            }
            expected |= set(ends) if written in texts else set()
            found = allowed(matcher, vocab_size)
            assert found == expected, written
            token = rng.choice(sorted(found))
            if token in ends:
                break
            complete = matcher.advance(token)
            written += pieces[token]
            assert complete == ({t for t in texts if t.startswith(written)} == {written})
        assert written in texts
        finished.add(written)
    assert len(finished) >= min(3, len(choices))


def byte_by_byte(character: str, pieces: set[bytes]) -> bool:
    return all(bytes([byte]) in pieces for byte in character.encode())


def test_token_bytes_equal_the_detokenizer() -> None:
    for backend in (byte_level_backend(), llama_backend()):
        tokenizer = make_tokenizer(backend)
        table = TokenTable.of(tokenizer, tokenizer.vocab_size)
        ids = tokenizer.encode("Hello wörld 日本\n👍🏽", add_special_tokens=False)
        prompt = tokenizer.encode("Hello world, how are you", add_special_tokens=False)
        written = tokenizer.detokenizer(prompt_token_ids=prompt).add(ids)
        assert b"".join(table.pieces[i] for i in ids).decode() == written


def test_a_model_with_fewer_logits_than_tokens() -> None:
    tokenizer = make_tokenizer(byte_level_backend())
    grammar = compile_grammar(tokenizer, 300, regex="[a-z ]+")
    assert allowed(grammar.start((1,)), 300) <= set(range(300))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(byte_level_backend())


def test_rollback_and_masks_along_a_draft(tokenizer: Tokenizer) -> None:
    vocab_size = tokenizer.vocab_size
    grammar = compile_grammar(tokenizer, vocab_size, regex="[a-z]+ [0-9]{2}(x|y)")
    matcher = grammar.start((1,))
    draft = tokenizer.encode("hello 42x", add_special_tokens=False)
    before = allowed(matcher, vocab_size)
    assert matcher.count_valid(draft) == len(draft)
    masks = np.zeros((len(draft) + 3, matcher.mask_width), np.int32)
    # The last token completes the text: no mask follows.
    assert matcher.fill_after(draft, masks, 1) == len(draft)
    assert allowed(matcher, vocab_size) == before, "the draft is not taken"
    for i, token in enumerate(draft):
        single = np.zeros((1, matcher.mask_width), np.int32)
        matcher.fill(single, 0)
        np.testing.assert_array_equal(single[0], masks[1 + i])
        assert matcher.advance(token) == (i == len(draft) - 1)
    matcher.rollback(len(draft))
    assert allowed(matcher, vocab_size) == before
    assert not masks[0].any() and not masks[-1].any()


def test_a_draft_that_leaves_the_grammar(tokenizer: Tokenizer) -> None:
    grammar = compile_grammar(tokenizer, tokenizer.vocab_size, regex="[a-z]+( [0-9]+)?")
    matcher = grammar.start((1,))
    good = tokenizer.encode("hello", add_special_tokens=False)
    masks = np.zeros((20, matcher.mask_width), np.int32)
    bad = [*good, *tokenizer.encode("!!", add_special_tokens=False)]
    assert matcher.count_valid(bad) == len(good)
    assert matcher.fill_after(bad, masks, 0) == len(good) + 1
    assert matcher.fill_after([*good, 1, *good], masks, 0) == len(good) + 1, "an end token ends a draft"
    assert masks[len(good), 0] & 2, "where it may come"
    assert matcher.fill_after([], masks, 0) == 1


def test_a_disallowed_token_is_an_error(tokenizer: Tokenizer) -> None:
    matcher = compile_grammar(tokenizer, tokenizer.vocab_size, choice=("yes", "no")).start((1,))
    (wrong,) = tokenizer.encode("q", add_special_tokens=False)
    with pytest.raises(MatcherError, match="does not fit"):
        matcher.advance(wrong)
    with pytest.raises(MatcherError):
        matcher.fill(np.zeros((1, matcher.mask_width), np.int32), 0)


def test_sequences_with_the_same_grammar_are_independent(tokenizer: Tokenizer) -> None:
    grammar = compile_grammar(tokenizer, tokenizer.vocab_size, choice=("yes", "no"))
    first, second = grammar.start((1,)), grammar.start((1,))
    first.advance(tokenizer.encode("y", add_special_tokens=False)[0])
    assert allowed(first, tokenizer.vocab_size) != allowed(second, tokenizer.vocab_size)


def test_special_tokens_by_name(tokenizer: Tokenizer) -> None:
    vocab_size = tokenizer.vocab_size
    (eot,) = tokenizer.encode("<|eot|>", add_special_tokens=False)
    matcher = compile_grammar(tokenizer, vocab_size, grammar='start: "a" <|eot|> "b"').start((1,))
    matcher.advance(tokenizer.encode("a", add_special_tokens=False)[0])
    assert allowed(matcher, vocab_size) == {eot}
    # The name as plain text is not the token.
    matcher = compile_grammar(tokenizer, vocab_size, choice=("<|eot|>",)).start((1,))
    assert eot not in allowed(matcher, vocab_size) and allowed(matcher, vocab_size)


def test_forced_text_is_not_precomputed(tokenizer: Tokenizer) -> None:
    grammar = compile_grammar(tokenizer, tokenizer.vocab_size, regex="(a{1000}){1000}")
    assert isinstance(grammar.matcher, LLMatcher)
    assert allowed(grammar.start(()), tokenizer.vocab_size)
