"""Embedding throughput: Neso's native and torch runners compared to transformers with padded batches.

A BERT with random weights (by default the size of bge-small, 12 layers of 384) and texts of mixed lengths.
transformers processes them in batches of --batch, once in order of arrival and once sorted by length. Sorting requires
all texts in advance.

usage: python bench/embeddings.py [--texts 64] [--batch 32] [--layers 12] [--hidden 384] [--threads N] [--dtype float32]
           [--smoke]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel
from transformers.utils import logging

from neso.engine.client.llm import LLM
from neso.generation import PoolingParams

VOCAB = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny model and few texts, to test the script")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.texts, arguments.layers, arguments.hidden, arguments.rounds = 4, 1, 64, 1
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    texts = mixed_texts(arguments.texts)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_model(directory, arguments.layers, arguments.hidden)
        run(directory, texts, arguments)


def run(directory: Path, texts: list[list[int]], arguments: argparse.Namespace) -> None:
    model = BertModel.from_pretrained(
        directory, add_pooling_layer=False, dtype=getattr(torch, arguments.dtype)
    ).eval()
    options = {"dtype": arguments.dtype, "num_threads": arguments.threads, "max_num_batched_tokens": 4096}
    contenders: dict[str, Callable[[], np.ndarray]] = {
        "transformers, unsorted": lambda: padded(model, texts, arguments.batch),
        "transformers, sorted": lambda: padded_sorted(model, texts, arguments.batch),
    }
    for runner in ("native", "torch"):
        llm = LLM(directory, runner=runner, **options)
        contenders[f"neso, {runner}"] = lambda llm=llm: llm.embed(texts, PoolingParams(pooling="mean"))
    results = {name: contend() for name, contend in contenders.items()}  # warm-up, and results to compare
    seconds = dict.fromkeys(contenders, float("inf"))
    for _ in range(arguments.rounds):  # interleaved, because the machine's speed varies
        for name, contend in contenders.items():
            started = time.perf_counter()
            contend()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    tokens = sum(len(text) for text in texts)
    base = seconds["transformers, unsorted"]
    reference = results["transformers, unsorted"]
    print(f"{len(texts)} texts, {tokens} tokens, {arguments.dtype}, {arguments.threads} threads")
    for name, took in seconds.items():
        cosine = np.einsum("ij,ij->i", results[name], reference).min()
        print(f"{name:<28}{tokens / took:>9.0f} tok/s {base / took:>6.2f} x   minimum cosine {cosine:.6f}")


def padded(model: BertModel, texts: list[list[int]], batch: int) -> np.ndarray:
    """Compute mean-pooled, normalized embeddings in batches padded to the longest text."""
    rows = []
    for start in range(0, len(texts), batch):
        part = texts[start : start + batch]
        longest = max(len(text) for text in part)
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in part])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in part])
        with torch.inference_mode():
            hidden = model(ids, attention_mask=mask).last_hidden_state.float()
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            rows.append(torch.nn.functional.normalize(pooled, dim=-1).numpy())
    return np.concatenate(rows)


def padded_sorted(model: BertModel, texts: list[list[int]], batch: int) -> np.ndarray:
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    embeddings = padded(model, [texts[index] for index in order], batch)
    return embeddings[np.argsort(order)]


def mixed_texts(count: int) -> list[list[int]]:
    """Token ids: most texts are short, some long, like questions and passages."""
    random = np.random.default_rng(0)
    lengths = np.clip(np.exp(random.normal(3.7, 0.9, count)), 4, 500).astype(int)
    return [random.integers(1, VOCAB, length).tolist() for length in lengths]


def write_model(directory: Path, layers: int, hidden: int) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        intermediate_size=4 * hidden,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(directory)
    words = {"[UNK]": 0, **{f"w{i}": i for i in range(1, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))


if __name__ == "__main__":
    main()
