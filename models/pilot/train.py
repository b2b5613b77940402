"""Train neso-pilot and write it into the package.

usage: python models/pilot/train.py [--minutes 50] [--output DIRECTORY]

The same seed, versions and number of steps give the same model; `--minutes` bounds the steps by the clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from corpus_format import read_corpus
from export import export
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file
from samples import Sample, SampleMaker, Shares
from train_tokenizer import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from neso.engine.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "neso" / "models" / "neso-pilot"
TOKENS_PER_STEP = 4096
WARMUP_STEPS = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Training options. Use a different seed each time training is resumed."""

    steps: int = 2400
    minutes: float = 50.0
    learning_rate: float = 2e-3
    tool_share: float = 0.5
    outside_share: float = 0.0
    seed: int = 0
    resume: bool = False


def make_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Return a model with 5.5 M random parameters."""
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
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def batches(maker: SampleMaker, seed: int) -> Iterator[list[Sample]]:
    """Yield batches of about `TOKENS_PER_STEP` tokens without end, each of samples with similar lengths."""
    rng = torch.Generator().manual_seed(seed)
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
    """Return input ids and labels, int64 [samples, longest]. Labels are -100 outside the answers."""
    longest = max(len(sample.prompt) + len(sample.answer) for sample in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, sample in enumerate(batch):
        start, end = len(sample.prompt), len(sample.prompt) + len(sample.answer)
        ids[row, :end] = torch.tensor(sample.prompt + sample.answer)
        labels[row, start:end] = torch.tensor(sample.answer)
    return ids, labels


def learning_rate(highest: float, step: int, done: float) -> float:
    """Return the learning rate: a warmup over steps, then a cosine over the fraction of work done."""
    return (
        highest * min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
    )


def load_weights(model: LlamaForCausalLM, directory: Path) -> None:
    """Load an exported model, which must have been trained with the tokenizer in its directory."""
    model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)


def train(directory: Path, plan: Plan) -> None:
    """Train for `plan.steps` or `plan.minutes`, whichever ends first, and export to `directory`."""
    torch.set_num_threads(2)
    entries = read_corpus()
    if not plan.resume:
        write_tokenizer(directory, entries)
    tokenizer = Tokenizer.from_directory(directory)
    model = make_model(tokenizer)
    if plan.resume:
        load_weights(model, directory)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    print(f"{len(entries)} entries, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    columns = (TextColumn("step {task.completed}, loss {task.fields[loss]:.3f}"), BarColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("train", total=plan.steps, loss=float("nan"))
        started, average = time.monotonic(), 0.0
        maker = SampleMaker(tokenizer, entries, plan.seed, Shares(plan.tool_share, plan.outside_share))
        for step, batch in enumerate(batches(maker, plan.seed)):
            done = max(step / plan.steps, (time.monotonic() - started) / (60 * plan.minutes))
            if done >= 1:
                break
            loss = _step(model, optimizer, batch, learning_rate(plan.learning_rate, step, done))
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
        # Compute logits of the answers only. Those of the prompts are most of the work and have no loss.
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
    for field in dataclasses.fields(Plan):
        if field.name != "resume":
            option = "--" + field.name.replace("_", "-")
            parser.add_argument(option, type=type(field.default), default=field.default)
    parser.add_argument("--resume", action="store_true", help="go on from the model in the output directory")
    values = vars(parser.parse_args())
    train(values.pop("output"), Plan(**values))
