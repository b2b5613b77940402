"""Tokenizer of a model: text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from neso.engine.text.detokenizer import (
    Detokenizer,
    FilteredDetokenizer,
    PieceDetokenizer,
    TokenPieces,
    WindowDetokenizer,
    token_name,
)
from neso.engine.text.tokenizer_files import (
    SpecialTokens,
    TokenizerError,
    TokenizerFiles,
    special_token_texts,
    token_text,
)
from neso.engine.weights.hub import resolve_model
from neso.generation import InvalidParameter

if TYPE_CHECKING:
    from neso.engine.text.chat_template import ChatTemplate


class Tokenizer:
    """Tokenizer of a model, a `neso.generation.TokenizerLike`. Thread-safe.

    It produces the same token ids as `transformers.AutoTokenizer`. As in its version 5, tokenizer.json defines the
    special tokens around a text; `add_bos_token` and `add_eos_token` in tokenizer_config.json are ignored, because the
    post-processor in tokenizer.json was derived from them. One known difference: for older Llama files, `transformers`
    5 does not prepend "▁" to a text that starts with a space; tokenizer.json, SentencePiece and this class do.
    """

    def __init__(
        self, backend: Backend, special_tokens: SpecialTokens, chat_templates: Mapping[str, str]
    ) -> None:
        """See `from_model`. This object takes ownership of `backend` and disables its truncation and padding."""
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = special_tokens
        self._backend = backend
        self._truncation_lock = Lock()
        self._chat_templates = dict(chat_templates)
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._pieces = TokenPieces.of(backend, self._special_ids)

    @classmethod
    def from_directory(
        cls, path: str | Path, *, add_bos_token: bool | None = None, add_eos_token: bool | None = None
    ) -> Tokenizer:
        """Load the tokenizer of a Hugging Face model directory. Raises `TokenizerError` with the file.

        `add_bos_token` and `add_eos_token` override the special tokens that tokenizer.json adds to a text; if only one
        is given, the other is False (as in `transformers`).
        """
        files = TokenizerFiles.read(Path(path))
        if add_bos_token is not None or add_eos_token is not None:
            files = replace(files, adds_bos_eos=(bool(add_bos_token), bool(add_eos_token)))
        return cls._from_files(files)

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer of a GGUF file. Raises `TokenizerError` with the file."""
        from neso.engine.text.gguf_tokenizer import read_gguf_tokenizer  # lazy: only for GGUF files

        return cls._from_files(read_gguf_tokenizer(Path(path)))

    @classmethod
    def from_model(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer of a model: `from_gguf` for a file, otherwise `from_directory`."""
        return cls.from_gguf(path) if Path(path).is_file() else cls.from_directory(path)

    @classmethod
    def _from_files(cls, files: TokenizerFiles) -> Tokenizer:
        backend = files.backend
        _add_missing_tokens(backend, files)
        special_tokens = SpecialTokens.resolve(files, backend.token_to_id)
        if files.adds_bos_eos is not None:
            adds_bos, adds_eos = files.adds_bos_eos
            begin = special_tokens.texts.get("bos_token") if adds_bos else None
            end = special_tokens.texts.get("eos_token") if adds_eos else None
            _surround(backend, begin, end)
        return cls(backend, special_tokens, files.chat_templates)

    def save(self, directory: Path) -> None:
        """Write files from which `from_directory` loads the same tokenizer, except the ids in config.json."""
        self._backend.save(str(directory / "tokenizer.json"))
        templates = [{"name": name, "template": text} for name, text in self._chat_templates.items()]
        config = {**self.special_tokens.texts, **({"chat_template": templates} if templates else {})}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Raises `InvalidParameter("prompt", …)` for invalid Unicode."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each of `texts`, computed in parallel if there are many. Raises like `encode`."""
        try:
            # Also used for one text: unlike the library's `encode`, it releases the GIL (`encode` held it for 2.5 s
            # over 1.8 MB) and does not compute offsets (3.7 times as fast).
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidParameter("prompt", f"is not valid Unicode text: {error}") from None
        return [encoding.ids for encoding in encodings]

    def encode_pair(
        self,
        text: str,
        second: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """Return the token ids and token types of a text, or of a pair in the format of the model's post-processor.

        Truncates to `max_tokens`: the end of the text, or of the longer text of a pair. Raises like `encode`, and
        `InvalidParameter("truncate_prompt_tokens", …)` if no token of the text would be left.
        """
        backend = self._backend if max_tokens is None else self._truncating_backend
        if max_tokens is not None and add_special_tokens:
            num_special = self._backend.num_special_tokens_to_add(second is not None)
            if max_tokens <= num_special:  # the library would not truncate
                raise InvalidParameter(
                    "truncate_prompt_tokens",
                    f"must be more than {num_special}, the special tokens around a text, got {max_tokens}",
                )
        given = text if second is None else (text, second)
        try:
            with self._truncation_lock if max_tokens is not None else nullcontext():
                if max_tokens is not None:
                    backend.enable_truncation(max_tokens)
                (encoding,) = backend.encode_batch_fast([given], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidParameter("prompt", f"is not valid Unicode text: {error}") from None
        return encoding.ids, encoding.type_ids

    @cached_property
    def _truncating_backend(self) -> Backend:
        """A separate copy for truncation, because truncation is a setting of the library's tokenizer."""
        return Backend.from_str(self._backend.to_str())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary are skipped."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.add(token_ids) + detokenizer.finish()

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        shown_special_tokens: Sequence[str] = (),
        prompt_token_ids: Sequence[int] = (),
    ) -> Detokenizer:
        """Create an incremental detokenizer for one sequence; its concatenated output equals `decode`.

        `shown_special_tokens` are not skipped. With `prompt_token_ids`, the text is a continuation of the prompt: it
        keeps the space before its first word, and completes a character whose first bytes are in the prompt.
        """
        shown = self._special_ids.intersection(map(self._backend.token_to_id, shown_special_tokens))
        if shown and skip_special_tokens:
            every = self.detokenizer(skip_special_tokens=False, prompt_token_ids=prompt_token_ids)
            return FilteredDetokenizer(every, self._special_ids - shown)
        if self._pieces is not None:
            return PieceDetokenizer(
                self._pieces, skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt_token_ids
            )
        hidden = self._special_ids if skip_special_tokens else frozenset[int]()
        return WindowDetokenizer(self._backend, special_ids=hidden, prompt_token_ids=prompt_token_ids)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, for log probabilities; a part of a character is U+FFFD."""
        if self._pieces is not None:
            return self._pieces.piece(token_id).decode("utf-8", "replace")
        if token_name(self._backend, token_id) is None:
            return ""
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the exact bytes of one token; None if the tokenizer has no bytes for single tokens (WordPiece)."""
        return None if self._pieces is None else self._pieces.piece(token_id)

    @cached_property
    def vocab_size(self) -> int:
        """Highest token id + 1. The model may have more rows, as padding."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return self._special_ids

    @property
    def bos_token_id(self) -> int | None:
        return self.special_tokens.bos_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence tokens of the tokenizer, generation_config.json and config.json."""
        return self.special_tokens.eos_ids

    @property
    def pad_token_id(self) -> int | None:
        return self.special_tokens.pad_id

    @property
    def backend(self) -> Backend:
        """The library's tokenizer, for guided decoding. Do not modify it."""
        return self._backend

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    @cached_property
    def chat_template_source(self) -> str:
        """Source of the chat templates; "" if there is none."""
        return "\n".join(self._chat_templates.values())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt for a chat; see `ChatTemplate.render`. Encode it without adding special tokens."""
        return self._chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        from neso.engine.text.chat_template import ChatTemplate  # lazy: imports jinja2

        return ChatTemplate(self._chat_templates, self.special_tokens.texts)


def _add_missing_tokens(backend: Backend, files: TokenizerFiles) -> None:
    """Add special tokens that are only in tokenizer_config.json.

    Named special tokens must be in the vocabulary, otherwise the model has no row for them. Tokens of
    `added_tokens_decoder` are added if the library assigns them the listed id.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for text in special_token_texts(files).values():
        if text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    declared = files.tokenizer_config.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return
    for token_id, token in sorted(declared.items(), key=lambda item: int(item[0])):
        content = token_text(token)
        if content is None or content in known:
            continue
        if int(token_id) in (backend.token_to_id(content), backend.get_vocab_size()):
            options = {
                k: v for k, v in token.items() if k in ("lstrip", "rstrip", "single_word", "normalized")
            }
            added = AddedToken(content, special=bool(token.get("special")), **options)
            (backend.add_special_tokens if added.special else backend.add_tokens)([added])


def _surround(backend: Backend, begin: str | None, end: str | None) -> None:
    """Add `begin` before and `end` after texts that are encoded with special tokens."""
    special = {token: backend.token_to_id(token) for token in (begin, end) if token is not None}
    missing = [token for token, token_id in special.items() if token_id is None]
    if missing:
        raise TokenizerError(f"{missing[0]!r} is not in the vocabulary, so it cannot be added to texts")
    single = [*([begin] if begin else []), "$A", *([end] if end else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=list(special.items())
    )


class NoTokenizer:
    """Replacement of `Tokenizer` for engines without a tokenizer (`skip_tokenizer_init`).

    Tokens have no text; texts are rejected with `InvalidParameter("prompt", …)`.
    """

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    has_chat_template = False
    chat_template_source = ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._reject()

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return an empty list for no texts; raises `InvalidParameter` for texts."""
        return self._reject() if texts else []

    def encode_pair(
        self,
        text: str,
        second: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> tuple[list[int], list[int]]:
        self._reject()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        shown_special_tokens: Sequence[str] = (),
        prompt_token_ids: Sequence[int] = (),
    ) -> NoDetokenizer:
        return _NO_DETOKENIZER

    def token_text(self, token_id: int) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes | None:
        return None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        self._reject()

    def _reject(self) -> NoReturn:
        raise InvalidParameter("prompt", "this engine has no tokenizer: it takes token ids only")


class NoDetokenizer:
    """A detokenizer whose text is always empty."""

    def add(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


NO_TOKENIZER = NoTokenizer()
EngineTokenizer = Tokenizer | NoTokenizer
_NO_DETOKENIZER = NoDetokenizer()


def load_tokenizer(model: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory, a GGUF file, a bundled model, or a model on the Hugging Face hub.

    Raises `ModelNotFound` and `TokenizerError`.
    """
    return Tokenizer.from_model(resolve_model(model))
