"""Small tokenizers, trained here, in the three styles that language models use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, how are you today?",
    "def main():\n    print('héllo wörld')\n\n    return 0",
    "日本語のテキスト 中文文本 한국어 Привет мир ğüşiöç",
    "👍🏽 👨‍👩‍👧 🇩🇪 🎉 café naïve",
] * 3

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_backend() -> Backend:
    """GPT-2, Llama 3, Qwen: BPE over bytes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>", "<|eot|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>", "日本 語"])  # ordinary tokens, as plain text
    return backend


def llama_backend(*, bos: bool = True, metaspace: bool = False) -> Backend:
    """Llama 2, Mistral, Gemma: BPE over "▁words" with byte tokens for the rest."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [  # type: ignore[list-item]
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*names, *BYTE_TOKENS], limit_alphabet=40, show_progress=False
    )
    backend.train_from_iterator(["Hello world how are you", "the quick brown fox"] * 3, trainer)
    # The byte tokens are ordinary tokens of the vocabulary, not special.
    raw = json.loads(backend.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] in names]
    if not metaspace:  # legacy format of the same: words are not split before the merges
        raw["pre_tokenizer"] = None
        raw["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        }
    backend = Backend.from_str(json.dumps(raw))
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return backend


def metaspace_backend() -> Backend:
    """T5 and Unigram models: the first "▁" of a text is not a space."""
    backend = llama_backend(bos=False, metaspace=True)
    backend.decoder = decoders.Metaspace()
    return backend


def wordpiece_backend() -> Backend:
    """BERT: the text of a token depends on its position, so tokens have no fixed bytes."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level_backend,
    "llama": llama_backend,
    "metaspace": metaspace_backend,
    "wordpiece": wordpiece_backend,
}


def write_directory(path: Path, backend: Backend, **files: Any) -> Path:
    """Write a model directory; keyword arguments such as `tokenizer_config={…}` are JSON files without the suffix."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return path
