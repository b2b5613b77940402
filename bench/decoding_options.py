"""Cost of decoding options compared to plain sampling: beam search, penalties, banned words, logit processing.

Prints milliseconds per step with beams and with the same number of sampled sequences, and the microseconds per sequence
and step that an option adds to the sampler with a large vocabulary.

usage: python bench/decoding_options.py [CHECKPOINT] [--widths 2 4 8] [--vocabulary 128256]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from smoke import parse_arguments

from neso.engine.beams.beam_search import BeamSearch
from neso.engine.client.llm import LLM
from neso.engine.core.request import EngineRequest
from neso.engine.core.sequence import Sequence
from neso.engine.sampling.sampler import Sampler
from neso.engine.sampling.state import SamplingState
from neso.engine.sampling.token_sampling import INVALID_TOKEN
from neso.generation import SamplingParams
from neso.models import SHIPPED_MODELS

STEPS, PROMPT, KNOWN = 60, 64, 400

OPTIONS: dict[str, dict[str, object]] = {
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.5},
    "logit_bias of 10": {"logit_bias": dict.fromkeys(range(10), 1.0)},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 3},
    "100 bad words": {},
    "top_p_decay": {"top_p_decay": 0.99},
    "logprobs": {"logprobs": 5},
    "return_generation_logits": {"return_generation_logits": True},
    "allowed_token_ids of 1000": {"allowed_token_ids": tuple(range(1000))},
    "embedding_bias": {"embedding_bias": b""},
}


def seconds_a_step(llm: LLM, sampling: SamplingParams, name: str) -> float:
    """Median duration of the decode steps."""
    request = EngineRequest(
        request_id=name, prompt_token_ids=list(range(10, 10 + PROMPT)), sampling=sampling, max_tokens=STEPS
    )
    llm.core.add(request)
    llm.core.step()
    times = []
    while llm.core.has_work:
        started = time.perf_counter()
        llm.core.step()
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def compare_widths(llm: LLM, widths: list[int]) -> None:
    print(f"{'width':>5} {'sampled ms':>11} {'beams ms':>9} {'ratio':>6}")
    for width in widths:
        sampled, beams = [], []
        for i in range(5):
            sampled.append(seconds_a_step(llm, SamplingParams(n=width, seed=i), f"sampled {width} {i}"))
            beams.append(seconds_a_step(llm, SamplingParams(beam_width=width), f"beams {width} {i}"))
        a, b = 1e3 * float(np.median(sampled)), 1e3 * float(np.median(beams))
        print(f"{width:>5} {a:>11.2f} {b:>9.2f} {b / a:>6.2f}", flush=True)


def make_request(vocabulary: int, name: str, options: dict[str, object]) -> EngineRequest:
    """A request with a prompt, so that penalties apply."""
    rng = np.random.default_rng(1)
    if name == "embedding_bias":
        options = {"embedding_bias": rng.normal(size=vocabulary).astype(np.float32).tobytes()}
    words = rng.integers(0, vocabulary, (100, 2)).tolist() if name == "100 bad words" else []
    return EngineRequest(
        request_id="",
        prompt_token_ids=rng.integers(0, vocabulary, KNOWN).tolist(),
        sampling=SamplingParams(seed=1, top_p=0.9, **options),  # type: ignore[arg-type]
        max_tokens=100_000,
        bad_words=tuple(map(tuple, words)),
    )


def microseconds_a_token(llm: LLM, vocabulary: int, name: str, options: dict[str, object]) -> float:
    """Time of the sampler for one sequence, minimum of several runs."""
    request = make_request(vocabulary, name, options)
    state = SamplingState.create(request, request.prompt_token_ids)
    logits = np.random.default_rng(0).normal(size=(1, vocabulary)).astype(np.float32) * 4
    # The draw itself costs the same with every option, so it is replaced.
    sampler = Sampler(lambda rows, draws: np.zeros(len(draws), np.int32))
    best = np.inf
    for _ in range(30):
        rows = [logits.copy() for _ in range(4)]
        started = time.perf_counter()
        for row in rows:
            (token,) = sampler.sample(row, [state])
            assert token.token_id != INVALID_TOKEN
        best = min(best, (time.perf_counter() - started) / len(rows))
    return 1e6 * best


def microseconds_a_beam(vocabulary: int, width: int) -> float:
    """Time of the selection of the next beams, per beam."""
    request = EngineRequest(
        request_id="",
        prompt_token_ids=[1] * KNOWN,
        sampling=SamplingParams(beam_width=width),
        max_tokens=100_000,
    )
    rng, best = np.random.default_rng(0), np.inf
    logits = rng.normal(size=(width, vocabulary)).astype(np.float32) * 4
    search = BeamSearch(Sequence(id=0, request=request, arrival=0))
    search.advance(logits[:1])
    for _ in range(30):
        started = time.perf_counter()
        search.advance(logits)
        best = min(best, time.perf_counter() - started)
    return 1e6 * best / width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=SHIPPED_MODELS["neso-pilot"])
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--vocabulary", type=int, default=128256)
    arguments = parse_arguments(parser, widths=[2], vocabulary=1000)
    llm = LLM(arguments.checkpoint, max_model_len=512, enable_prefix_caching=False)
    compare_widths(llm, arguments.widths)
    plain = microseconds_a_token(llm, arguments.vocabulary, "plain", {})
    print(f"\n{'plain':28} {plain:8.0f} us per token, without the draw")
    for name, options in OPTIONS.items():
        cost = microseconds_a_token(llm, arguments.vocabulary, name, options)
        print(f"{name:28} {cost:8.0f} us, {cost - plain:+.0f}", flush=True)
    for width in arguments.widths:
        print(f"{f'{width} beams':28} {microseconds_a_beam(arguments.vocabulary, width):8.0f} us per beam")


if __name__ == "__main__":
    main()
