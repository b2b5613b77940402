"""Cost of guided decoding: output tokens per second with and without it, masks, and compilation.

The models have random weights, so guided outputs are random texts of the grammar and masks vary as much as possible.
Unguided and guided requests of the same length alternate in one process.

usage: python bench/guided_decoding.py [--vocab 32000 128256] [--batch 1 8 32] [--tokens 64]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from checkpoint import SHAPES, write_checkpoint
from smoke import parse_arguments

from neso.engine.client.llm import LLM
from neso.engine.guided.compiler import GrammarCompiler
from neso.engine.guided.grammar_matcher import CompiledGrammar
from neso.generation import GuidedDecoding, SamplingParams

SHAPE = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate": 1408}
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "kind": {"enum": ["town", "village", "city"]}},
            "required": ["x", "kind"],
        },
    },
    "required": ["name", "age", "tags", "place"],
}
# Long enough for any number of tokens.
RECORDS = {"type": "array", "items": RECORD, "minItems": 1000}
GRAMMARS = {
    "a choice of 3": GuidedDecoding(choice=("yes", "no", "maybe")),
    "a regular expression": GuidedDecoding(regex=r"[a-z]+@[a-z]+\.(com|org)"),
    "any JSON object": GuidedDecoding(json_object=True),
    "a schema of 4 members": GuidedDecoding(json=RECORD),
    "a schema of 300 members": GuidedDecoding(
        json={"type": "object", "properties": {f"member_{i}": {"type": "integer"} for i in range(300)}}
    ),
    "a choice of 5000": GuidedDecoding(choice=tuple(f"product number {i}" for i in range(5000))),
}


def tokens_per_second(llm: LLM, batch: int, sampling: SamplingParams) -> float:
    prompts = [[7 + i] * 16 for i in range(batch)]
    started = time.perf_counter()
    results = llm.generate(prompts, sampling, progress=False)
    seconds = time.perf_counter() - started
    return sum(len(result.outputs[0].token_ids) for result in results) / seconds


def compare(llm: LLM, batch: int, tokens: int, rounds: int = 3) -> tuple[float, float]:
    """Tokens per second without and with guided decoding: medians of alternating runs."""
    free = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1)
    guided = SamplingParams(
        max_tokens=tokens, ignore_eos=True, seed=1, guided_decoding=GuidedDecoding(json=RECORDS)
    )
    tokens_per_second(llm, batch, guided)
    speeds = [
        (tokens_per_second(llm, batch, free), tokens_per_second(llm, batch, guided)) for _ in range(rounds)
    ]
    return median(free for free, _ in speeds), median(guided for _, guided in speeds)


def compile_grammar(compiler: GrammarCompiler, guided: GuidedDecoding) -> tuple[CompiledGrammar, float]:
    """The compiled grammar, and the seconds of the compilation."""
    started = time.perf_counter()
    compilation = compiler.compile(guided)
    compilation.done.wait()
    seconds = time.perf_counter() - started
    assert isinstance(compilation.result, CompiledGrammar), compilation.result
    return compilation.result, seconds


def mask_microseconds(grammar: CompiledGrammar, steps: int = 300) -> list[float]:
    """Microseconds per mask along random texts."""
    rng = np.random.default_rng(0)
    spent: list[float] = []
    guide = grammar.start((0,))
    masks = np.zeros((1, guide.mask_width), np.int32)
    while len(spent) < steps:
        started = time.perf_counter()
        guide.fill(masks, 0)
        spent.append(1e6 * (time.perf_counter() - started))
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        if token == 0 or guide.advance(token):
            guide = grammar.start((0,))
    return spent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 128256])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parse_arguments(parser, vocab=[8192], batch=[2], tokens=8)
    for vocab in arguments.vocab:
        with tempfile.TemporaryDirectory() as directory:
            SHAPES["guided"] = {**SHAPE, "vocab": vocab}
            write_checkpoint(Path(directory), "guided")
            report(Path(directory), vocab, arguments.batch, arguments.tokens)


def report(checkpoint: Path, vocab: int, batches: list[int], tokens: int) -> None:
    llm = LLM(checkpoint, max_model_len=1024, num_blocks=4096)
    print(f"\nvocabulary of {vocab} ({llm.tokenizer.vocab_size} tokens)")
    print(f"{'batch':>24} {'free tok/s':>11} {'guided tok/s':>13} {'ratio':>6}")
    for batch in batches:
        free, guided = compare(llm, batch, tokens)
        print(f"{batch:>24} {free:11.0f} {guided:13.0f} {guided / free:6.2f}")
    compiler = GrammarCompiler(lambda: llm.tokenizer, vocab, timeout=60)
    _, first = compile_grammar(compiler, GuidedDecoding(regex="a"))
    print(f"first grammar: {first:.2f} s, including the tokenizer and the sandbox process")
    print(f"{'':>24} {'compile ms':>11} {'mask µs':>13} {'longest':>8}")
    for name, guided_decoding in GRAMMARS.items():
        grammar, seconds = compile_grammar(compiler, guided_decoding)
        spent = mask_microseconds(grammar)
        print(f"{name:>24} {1e3 * seconds:11.1f} {median(spent):13.1f} {max(spent):8.0f}")


if __name__ == "__main__":
    main()
