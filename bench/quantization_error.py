"""Accuracy of quantization: logits of each scheme compared to float32.

With --venv (see vs_llamacpp.py), also compares llama.cpp's logits for Q8_0 and Q4_0 files of the same checkpoint.

usage: python bench/quantization_error.py [CHECKPOINT] [--positions 256] [--venv DIR] [--smoke]
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf_checkpoint import write_gguf

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.base import CacheLayout, RunnerOptions
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import open_source
from neso.engine.weights.hub import resolve_model

SCHEMES = {
    "bfloat16": RunnerOptions(dtype="bfloat16"),
    "int8": RunnerOptions(quantization="int8"),
    "int8_dynamic": RunnerOptions(quantization="int8_dynamic"),
    "int4": RunnerOptions(quantization="int4"),
}

LLAMA = """
import sys, numpy as np, llama_cpp
tokens = np.load(sys.argv[2]).tolist()
model = llama_cpp.Llama(sys.argv[1], n_ctx=2048, n_batch=1, logits_all=True, verbose=False)
for token in tokens:
    model.eval([token])
np.save(sys.argv[3], np.array(model.scores[: len(tokens)], np.float32))
"""


def logits_of(model: Path, options: RunnerOptions, tokens: np.ndarray, *, one_by_one: bool) -> np.ndarray:
    """Logits float32[tokens, vocab], computed one token per step (decode) or all at once (prefill)."""
    with open_source(model) as source:
        spec = decoder_spec(source.config)
        runner = NativeRunner.load(spec, source, options)
    blocks = -(-len(tokens) // 16)
    runner.allocate_cache(CacheLayout(blocks, 16))
    size = 1 if one_by_one else len(tokens)
    rows = [
        runner.step(_plan(tokens[start : start + size], start, blocks)).copy()
        for start in range(0, len(tokens), size)
    ]
    return np.concatenate(rows)


def _plan(tokens: np.ndarray, start: int, blocks: int) -> StepPlan:
    return StepPlan(
        step=1,
        sequence_ids=np.zeros(1, np.int32),
        token_ids=tokens.astype(np.int32),
        query_start=np.array([0, len(tokens)], np.int32),
        num_computed=np.array([start], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        block_copies=np.empty((0, 2), np.int32),
        logits_rows=np.arange(len(tokens), dtype=np.int32),
    )


def report(name: str, found: np.ndarray, exact: np.ndarray) -> None:
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    p, q = (_log_softmax(x.astype(np.float64)) for x in (exact, found))
    divergence = (np.exp(p) * (p - q)).sum(axis=1).mean()
    agree = (found.argmax(axis=1) == exact.argmax(axis=1)).mean()
    print(
        f"{name:28} logits {100 * error:6.2f} %   KL {divergence:.2e}   same best token {100 * agree:5.1f} %"
    )


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="neso-pilot")
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--smoke", action="store_true", help="few positions, to test the script")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.positions = 4
    model = resolve_model(arguments.checkpoint)
    with open_source(model) as source:
        vocab = min(8000, source.config["vocab_size"])
    tokens = np.random.default_rng(0).integers(6, vocab, arguments.positions)
    exact = logits_of(model, RunnerOptions(dtype="float32"), tokens, one_by_one=False)
    print(f"{model.name}, {arguments.positions} positions, relative to float32")
    for name, options in SCHEMES.items():
        report(name, logits_of(model, options, tokens, one_by_one=True), exact)
        report(f"{name}, prefill", logits_of(model, options, tokens, one_by_one=False), exact)
    if arguments.venv is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "tokens.npy", tokens)
        for kind in ("BF16", "Q8_0", "Q4_0"):
            file, result = Path(folder) / f"{kind}.gguf", Path(folder) / f"{kind}.npy"
            write_gguf(model, file, GGMLQuantizationType[kind])
            python = str(arguments.venv / "bin" / "python")
            subprocess.run([python, "-c", LLAMA, str(file), f"{folder}/tokens.npy", str(result)], check=True)
            report(f"llama.cpp {kind}", np.load(result), exact)


if __name__ == "__main__":
    main()
