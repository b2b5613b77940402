"""Speedup of speculative decoding by acceptance rate.

The first rows use a proposer that knows the output and is correct with a given probability; they show the cost and gain
of verification. The other rows use n-grams on a repetitive text, a draft model that always agrees (the model itself:
all draft tokens are accepted, but cost as much as they save) and a draft model that never agrees, with and without
`adaptive_speculation`.

usage: python bench/spec_decode.py [--size m] [--tokens 96] [--batch 1 4]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from checkpoint import SHAPES, write_checkpoint
from smoke import parse_arguments

from neso.engine.addons.registry import standard_addons
from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.core.sequence import Sequence
from neso.engine.load.loader import load_engine
from neso.engine.loop.engine_core import EngineCore
from neso.engine.spec_decode.draft import Draft
from neso.engine.spec_decode.draft_length import DraftLength
from neso.engine.spec_decode.speculator import Proposer, SpeculativeDecoding
from neso.generation import SamplingParams

LENGTH = 5
Outputs = dict[str, list[int]]


class OracleProposer(Proposer):
    """Proposes each token correctly with a given probability, from the outputs of an earlier run."""

    def __init__(self, outputs: Outputs, right: float) -> None:
        self._outputs, self._right = outputs, right
        self._rng = random.Random(0)

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        at = sequence.num_output_tokens
        known = self._outputs[sequence.request.request_id][at : at + most]
        return Draft([token if self._rng.random() < self._right else 3 for token in known])


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 4000) for _ in range(16)] * 4


def generate(core: EngineCore, batch: int, tokens: int) -> tuple[Outputs, float, float]:
    """Greedy outputs, decoded tokens per second, and acceptance rate."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    before = core.stats().drafts
    for i in range(batch):
        core.add(
            EngineRequest(request_id=str(i), prompt_token_ids=prompt(i), sampling=sampling, max_tokens=tokens)
        )
    outputs: Outputs = {str(i): [] for i in range(batch)}
    while not all(outputs.values()):
        take(core, outputs)
    first = sum(map(len, outputs.values()))
    started = time.perf_counter()
    while core.has_work:
        take(core, outputs)
    seconds = time.perf_counter() - started
    after = core.stats().drafts
    drafted = after.draft_tokens - before.draft_tokens
    accepted = (after.accepted_tokens - before.accepted_tokens) / drafted if drafted else 0.0
    return outputs, (batch * tokens - first) / seconds, accepted


def take(core: EngineCore, outputs: Outputs) -> None:
    for output in core.step():
        assert not output.error, output.error
        outputs[output.request_id] += output.token_ids


def load(model: Path, **options: object) -> EngineCore:
    common = {"runner": "native", "max_model_len": 1024, "num_blocks": 1024, "enable_prefix_caching": False}
    return load_engine(EngineConfig.from_options(str(model), {**common, **options}))[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="m")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    args = parse_arguments(parser, size="s", tokens=8, batch=[1])
    SHAPES["draft"] = {
        **SHAPES["s"],
        "vocab": SHAPES[args.size]["vocab"],
        "hidden": 256,
        "layers": 2,
        "heads": 4,
    }
    with tempfile.TemporaryDirectory() as folder:
        model, draft = Path(folder, "model"), Path(folder, "draft")
        write_checkpoint(model, args.size)
        write_checkpoint(draft, "draft")
        plain = load(model)
        fixed = {"num_speculative_tokens": LENGTH, "adaptive_speculation": False}
        cores = {
            "n-grams": load(model, speculative="ngram", **fixed),
            "n-grams, adaptive": load(model, speculative="ngram"),
            "draft model that agrees": load(model, speculative_model=str(model), **fixed),
            "draft model that disagrees": load(model, speculative_model=str(draft), **fixed),
            "the same, adaptive": load(model, speculative_model=str(draft)),
        }
        for batch in args.batch:
            outputs, _, _ = generate(plain, batch, args.tokens)
            print(f"batch {batch:<3} {'proposer':28} {'accepted':>9} {'tokens/s':>9} {'ratio':>6}")
            for right in (0.0, 0.4, 0.6, 0.8, 1.0):
                core = load_oracle(plain, outputs, right)
                report(f"right with {right:.1f}", plain, core, batch, args.tokens, outputs)
            for name, core in cores.items():
                report(name, plain, core, batch, args.tokens, outputs)


def load_oracle(plain: EngineCore, outputs: Outputs, right: float) -> EngineCore:
    """Create an engine with the weights and the cache of `plain`."""
    speculation = SpeculativeDecoding(OracleProposer(outputs, right), DraftLength(LENGTH, fixed=True))
    addons = standard_addons(plain.runner, speculation=speculation)
    num_blocks = plain.scheduler.kv.pool.num_blocks
    return EngineCore(plain.runner, plain.scheduler.config, num_blocks, addons)


def report(name: str, plain: EngineCore, core: EngineCore, batch: int, tokens: int, outputs: Outputs) -> None:
    """Measure the cases in turns and print the best of three runs each."""
    ours, theirs, accepted = 0.0, 0.0, 0.0
    for _ in range(3):
        theirs = max(theirs, generate(plain, batch, tokens)[1])
        found, rate, accepted = generate(core, batch, tokens)
        same = sum(a == b for i in outputs for a, b in zip(found[i], outputs[i], strict=True))
        ours = max(ours, rate)
    agreement = "" if same == batch * tokens else f"  ({same} of {batch * tokens} tokens the same)"
    print(f"          {name:28} {accepted:9.0%} {ours:9.1f} {ours / theirs:6.2f}{agreement}", flush=True)


if __name__ == "__main__":
    main()
