"""Measures an engine without server and clients, in a process of its own, also of another installed version."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from neso import LLM, SamplingParams


def engine_rate(python: Path, model: Path, prompts: list[list[int]], osl: int, max_num_seqs: int) -> float:
    """Return the output tokens per second of the Neso that `python` imports; each prompt gets `osl` tokens.

    Raises `RuntimeError` if the process fails.
    """
    work = json.dumps([str(model), prompts, osl, max_num_seqs])
    command = [str(python), "-c", "import engine_rate; engine_rate.run()"]
    process = subprocess.run(
        command, input=work, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    if process.returncode:
        raise RuntimeError(f"the engine of {python} failed")
    return float(process.stdout.split()[-1])


def run() -> None:
    """Read the work from the standard input and print the rate."""
    model, prompts, osl, max_num_seqs = json.load(sys.stdin)
    llm = LLM(model, max_num_seqs=max_num_seqs, max_model_len=max(map(len, prompts)) + osl + 1)
    sampling = SamplingParams(temperature=1.0, seed=1, ignore_eos=True, max_tokens=osl)
    # Other tokens than those of the prompts: no part of the prompts may be in the prefix cache.
    warm_up = [[token + 1 for token in prompt] for prompt in prompts[:2]]
    llm.generate(warm_up, sampling, progress=False)
    started = time.perf_counter()
    llm.generate(prompts, sampling, progress=False)
    print(len(prompts) * osl / (time.perf_counter() - started))
