"""Train the tokenizer and write it with the chat template into the model's directory."""

from __future__ import annotations

import json
import random
from pathlib import Path

from corpus_format import Entry, read_corpus
from samples import END_OF_TEXT, END_OF_TURN
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tool_examples import make_example

VOCABULARY = 4096
START_OF_TURN = "<|im_start|>"
SPECIAL_TOKENS = [END_OF_TEXT, START_OF_TURN, END_OF_TURN, "<|pad|>"]
TEMPLATE = Path(__file__).parent / "chat_template.jinja"
DOCUMENTS = Path(__file__).parents[2] / "docs"


def write_tokenizer(directory: Path, entries: list[Entry]) -> None:
    """Train byte-level BPE on the corpus and on random tool calls. Encoding adds no special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(entries), trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TURN,
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": TEMPLATE.read_text(encoding="utf-8"),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _texts(entries: list[Entry]) -> list[str]:
    rng = random.Random(0)
    texts = [text for entry in entries for text in (*entry.questions, f" {entry.answer}", entry.answer)]
    for _ in range(300):
        example = make_example(rng)
        texts += [json.dumps(example.tools), json.dumps(example.messages), example.answer]
    # The documentation contains words that the corpus lacks.
    pages = [path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.rglob("*.md"))]
    return [*texts, *pages, TEMPLATE.read_text(encoding="utf-8")]


if __name__ == "__main__":
    from train import MODEL

    write_tokenizer(MODEL, read_corpus())
