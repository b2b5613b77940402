"""Trains neso-pilot from nothing and writes it where the package carries it.

usage: python models/pilot/train.py [--minutes 50] [--output DIRECTORY]

The same seed, versions and number of steps give the same model; `--minutes` bounds the steps by the clock.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from corpus_format import read_corpus
from export import export
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from samples import Sample, SampleMaker
from train_tokenizer import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from neso.engine.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "neso" / "models" / "neso-pilot"
SEED = 0
TOKENS_PER_STEP = 4096
LEARNING_RATE = 2e-3
WARMUP_STEPS = 60


def make_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """5.5 M parameters, random."""
    end_of_text, _, end_of_turn, pad = range(4)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=[end_of_turn, end_of_text],
        pad_token_id=pad,
    )
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config)


def batches(maker: SampleMaker) -> Iterator[list[Sample]]:
    """Endless batches of about `TOKENS_PER_STEP` tokens, of samples of like length, in random order."""
    rng = torch.Generator().manual_seed(SEED)
    while True:
        samples = [sample for _ in range(8) for sample in maker.epoch()]
        samples.sort(key=lambda sample: len(sample.prompt) + len(sample.answer))
        groups, group = [], list[Sample]()
        for sample in samples:
            longest = len(sample.prompt) + len(sample.answer)
            if group and longest * (len(group) + 1) > TOKENS_PER_STEP:
                groups.append(group)
                group = []
            group.append(sample)
        groups.append(group)
        for i in torch.randperm(len(groups), generator=rng).tolist():
            yield groups[i]


def tensors(batch: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, int64 [samples, longest]; labels are -100 outside the answers."""
    longest = max(len(sample.prompt) + len(sample.answer) for sample in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, sample in enumerate(batch):
        start, end = len(sample.prompt), len(sample.prompt) + len(sample.answer)
        ids[row, :end] = torch.tensor(sample.prompt + sample.answer)
        labels[row, start:end] = torch.tensor(sample.answer)
    return ids, labels


def learning_rate(step: int, done: float) -> float:
    """Warmup by steps, then a cosine over the share of the work that is done."""
    return (
        LEARNING_RATE
        * min(1.0, (step + 1) / WARMUP_STEPS)
        * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
    )


def train(directory: Path, minutes: float, max_steps: int) -> None:
    """Train for `max_steps` or `minutes`, whichever ends first, and export to `directory`."""
    torch.set_num_threads(2)
    entries = read_corpus()
    write_tokenizer(directory, entries)
    tokenizer = Tokenizer.from_directory(directory)
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    print(f"{len(entries)} entries, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    columns = (TextColumn("step {task.completed}, loss {task.fields[loss]:.3f}"), BarColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("train", total=max_steps, loss=float("nan"))
        started, average = time.monotonic(), 0.0
        for step, batch in enumerate(batches(SampleMaker(tokenizer, entries, SEED))):
            done = max(step / max_steps, (time.monotonic() - started) / (60 * minutes))
            if done >= 1:
                break
            loss = _step(model, optimizer, batch, learning_rate(step, done))
            average = loss if step == 0 else 0.95 * average + 0.05 * loss
            bar.update(task, completed=step + 1, loss=average)
    export(model, directory)


def _step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: list[Sample], rate: float
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    ids, labels = tensors(batch)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids).last_hidden_state
        # Logits of the answers only: those of the prompts are most of the work and count for nothing.
        wanted = labels[:, 1:] != -100
        logits = model.lm_head(hidden[:, :-1][wanted])
    loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][wanted])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=MODEL)
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=2400)
    arguments = parser.parse_args()
    train(arguments.output, arguments.minutes, arguments.steps)
