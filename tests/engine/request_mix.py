"""Requests of every kind, and an engine that is stepped manually, with the results of each request."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from medusa_files import NUM_HEADS, head_tensors, write_heads
from peft_adapters import write_adapter

from neso.engine.client.input_processor import InputProcessor
from neso.engine.client.output_processor import PooledState, RequestState
from neso.engine.config import EngineConfig
from neso.engine.core.request import EngineRequest
from neso.engine.errors import EngineError
from neso.engine.guided.addon import GuidedDecodingAddon
from neso.engine.load.loader import load_engine
from neso.engine.loop.engine_core import EngineCore
from neso.engine.lora.manager import LoraManager
from neso.engine.spec_decode.speculator import SpeculativeDecoding
from neso.engine.text.tokenizer import Tokenizer
from neso.generation import (
    DraftTokens,
    GenerationOutput,
    GenerationRequest,
    GuidedDecoding,
    InvalidParameter,
    LoraRequest,
    PooledOutput,
    PoolingParams,
    PoolingRequest,
    SamplingParams,
)

VOCAB = 384
HIDDEN = 48
MAX_TOKENS = 18

AnyRequest = GenerationRequest | PoolingRequest


@dataclass
class Answer:
    """Results of a request by sequence. `numbers` are compared with a tolerance, everything else exactly."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple[object, object]] = field(default_factory=dict)
    error: str = ""
    logprob_ids: dict[int, list[int]] = field(default_factory=dict)
    numbers: dict[str, list[np.ndarray]] = field(default_factory=dict, compare=False)

    def take(self, output: GenerationOutput | PooledOutput) -> None:
        if isinstance(output, PooledOutput):
            self._add_numbers("pooled", output.values)
            return
        if output.prompt_logprobs:
            self._add_numbers("prompt", [e.logprob for e in output.prompt_logprobs if e is not None])
        if output.context_logits is not None:
            self._add_numbers("context", output.context_logits)
        for delta in output.deltas:
            self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
            self.ends[delta.index] = (delta.finish_reason, delta.stop_reason)
            if delta.logprobs:
                self.logprob_ids.setdefault(delta.index, []).extend(e.token_id for e in delta.logprobs)
                self._add_numbers(f"logprobs {delta.index}", [e.logprob for e in delta.logprobs])
            if delta.generation_logits is not None:
                self._add_numbers(f"logits {delta.index}", delta.generation_logits)

    def _add_numbers(self, name: str, values: Any) -> None:
        self.numbers.setdefault(name, []).append(np.asarray(values))

    def begins(self, whole: Answer) -> bool:
        """Return whether this is a prefix of `whole`, as for an aborted request."""
        return all(tokens == whole.tokens[i][: len(tokens)] for i, tokens in self.tokens.items())

    def assert_equal(self, other: Answer, name: str) -> None:
        assert self == other, name
        assert self.numbers.keys() == other.numbers.keys(), name
        for key, parts in self.numbers.items():
            mine, theirs = np.concatenate(parts), np.concatenate(other.numbers[key])
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=2e-3, err_msg=f"{name}: {key}")


def prompts(seed: int = 3) -> dict[str, list[int]]:
    """Return prompts, some of which share a prefix, so that they share blocks of the prefix cache."""
    rng = random.Random(seed)
    shared = [rng.randrange(6, 300) for _ in range(17)]
    return {
        "short": [rng.randrange(6, 300) for _ in range(3)],
        "long": [rng.randrange(6, 300) for _ in range(29)],
        "repeated": [rng.randrange(6, 300) for _ in range(5)] * 4,
        "shared-1": [*shared, 7],
        "shared-2": [*shared, 8, 9],
    }


def vectors(count: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, HIDDEN)) * 0.3).astype(np.float32)


def with_prompt(name: str, params: dict[str, Any], **options: Any) -> GenerationRequest:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": MAX_TOKENS, **params})
    options = {"prompt": [] if name == "vectors" else prompts()[name], **options}
    if name == "vectors":
        options["prompt_embeds"] = vectors(21)
    return GenerationRequest(sampling=sampling, **options)


FREE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "ignore_eos": {"ignore_eos": True},
    "drawn": {"temperature": 0.8, "seed": 1},
    "drawn-filtered": {"temperature": 0.9, "seed": 2, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "greedy-penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.7},
    "no-repeat": {"no_repeat_ngram_size": 2},
    "decay": {"temperature": 1.0, "seed": 4, "top_p": 0.9, "top_p_decay": 0.8, "top_p_reset_ids": 40},
    "biased": {
        "temperature": 0.7,
        "seed": 6,
        "logit_bias": {9: 2.0},
        "min_tokens": 5,
        "stop_token_ids": (9,),
    },
    "allowed": {"allowed_token_ids": tuple(range(5, 60)), "temperature": 0.8, "seed": 8},
    "embedding-bias": {"embedding_bias": np.linspace(-1, 1, VOCAB, dtype=np.float32).tobytes()},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "drawn-logprobs": {"temperature": 0.6, "seed": 5, "logprobs": 1},
    "logits": {"return_context_logits": True, "return_generation_logits": True},
    "drawn-logits": {"temperature": 0.8, "seed": 12, "return_generation_logits": True, "top_k": 12},
    "several": {"n": 3, "temperature": 0.8, "seed": 8, "logprobs": 0},
    "best-of": {"n": 2, "best_of": 3, "temperature": 0.8, "seed": 9},
    "best-of-penalties": {"best_of": 3, "temperature": 0.8, "seed": 10, "presence_penalty": 0.8},
    "stop": {"stop": ("e", "1", " "), "temperature": 0.8, "seed": 11},
    "several-stop": {"n": 3, "stop": ("a", "o", "4"), "temperature": 0.9, "seed": 13},
}
"""Sampling parameters, as any prompt may have them."""

BEAMS: dict[str, dict[str, Any]] = {
    "beams": {"beam_width": 3, "n": 3},
    "beams-logits": {"beam_width": 2, "return_context_logits": True, "return_generation_logits": True},
    "beams-logprobs": {"beam_width": 3, "n": 2, "logprobs": 2, "prompt_logprobs": 1, "length_penalty": 0.6},
    "beams-banned": {"beam_width": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "min_tokens": 4},
}

REGEX = GuidedDecoding(regex="(ab|cd|[0-9]){4,9}")
GUIDED: dict[str, dict[str, Any]] = {
    "guided": {"guided_decoding": REGEX},
    "guided-drawn": {"guided_decoding": REGEX, "temperature": 0.9, "seed": 21},
    "guided-several": {"guided_decoding": REGEX, "temperature": 0.9, "seed": 22, "n": 3},
    "guided-best-of": {"guided_decoding": REGEX, "temperature": 0.9, "seed": 23, "best_of": 2},
    "guided-logprobs": {"guided_decoding": REGEX, "logprobs": 2, "return_generation_logits": True},
    "guided-stop": {"guided_decoding": REGEX, "stop": ("b", "7"), "temperature": 0.9, "seed": 24},
    "guided-min": {"guided_decoding": REGEX, "min_tokens": 6, "repetition_penalty": 1.3},
    "guided-banned": {"guided_decoding": REGEX, "no_repeat_ngram_size": 2, "bad_words": ("ab", "1")},
    "guided-json": {
        "guided_decoding": GuidedDecoding(
            json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        )
    },
    "guided-choice": {"guided_decoding": GuidedDecoding(choice=("yes", "no", "perhaps")), "logprobs": 1},
}


def catalogue(known: list[int] | None = None) -> dict[str, AnyRequest]:
    """Return requests by name, deterministic by name. `known`: the model's output for the prompt "long"."""
    rng = random.Random(5)
    names = list(prompts())
    found: dict[str, AnyRequest] = {}
    for name, params in {**FREE, **BEAMS, **GUIDED}.items():
        found[name] = with_prompt(rng.choice(names), params)
        found[f"{name}+lora"] = with_prompt(
            rng.choice(names), params, lora=LoraRequest(name=rng.choice("ab")), queue_timeout_ms=1e6
        )
        if params.get("prompt_logprobs") is None:
            found[f"{name}+vectors"] = with_prompt("vectors", params)
    for name in names:
        found[f"prompt {name}"] = with_prompt(name, {}, priority=rng.choice([-1, 0, 1]))
        found[f"prompt {name}+lora"] = with_prompt(name, {}, lora=LoraRequest(name="a"))
    found["table"] = with_prompt(
        "short",
        {},
        prompt=[VOCAB + 1, VOCAB, 9, 10, 11, VOCAB + 2, 12],
        prompt_embedding_table=vectors(3, seed=1),
        lora=LoraRequest(name="b"),
    )
    for kind in ("mean", "last", "max", "cls"):
        found[f"pooling {kind}"] = PoolingRequest(prompts()["shared-2"], PoolingParams(pooling=kind))
        found[f"pooling {kind}+lora"] = PoolingRequest(prompts()["long"], PoolingParams(pooling=kind))
    return found | ({} if known is None else _about(known))


def _about(known: list[int]) -> dict[str, AnyRequest]:
    """Return requests with stop conditions or drafts that match the known output."""
    half_right = [*known[:4], (known[4] + 1) % 300, known[5]]
    digits = [ord(c) - ord("!") + 6 for c in "12"]
    params: dict[str, tuple[dict[str, Any], list[int] | None]] = {
        "stop-words": ({"stop_words": (tuple(known[5:7]), (known[12],))}, None),
        "bad-words": ({"bad_words": (tuple(known[2:4]), (known[8],))}, None),
        "min-tokens": ({"min_tokens": 9, "stop_token_ids": tuple(known[3:5])}, None),
        "stop-token": ({"stop_token_ids": (known[7],), "include_stop_str_in_output": True}, None),
        "draft": ({}, half_right),
        "draft-whole": ({"logprobs": 1}, known),
        "draft-scored": ({"logprobs": 2, "return_generation_logits": True, "prompt_logprobs": 1}, half_right),
        "draft-penalties": ({"frequency_penalty": 0.5, "no_repeat_ngram_size": 3}, half_right),
        "draft-stop": ({"stop_token_ids": (known[2],), "min_tokens": 2}, half_right),
        "draft-drawn": ({"temperature": 0.8, "seed": 30}, half_right),
        "draft-guided": ({"guided_decoding": REGEX}, [*digits, known[0], digits[0]]),
    }
    found: dict[str, AnyRequest] = {}
    for name, (fields, draft) in params.items():
        tokens = None if draft is None else DraftTokens(draft)
        found[name] = with_prompt("long", fields, draft=tokens)
        found[f"{name}+lora"] = with_prompt("long", fields, draft=tokens, lora=LoraRequest(name="a"))
        if "prompt_logprobs" not in fields:
            found[f"{name}+vectors"] = with_prompt("vectors", fields, draft=tokens)
    return found


class Mixed:
    """An engine that is stepped manually."""

    def __init__(self, model: str, **options: Any) -> None:
        core, info = load_engine(EngineConfig.from_options(model, {"dtype": "float32", **options}))
        assert isinstance(core, EngineCore)
        self.core = core
        self.info = info
        self._proposes = core.addon(SpeculativeDecoding).proposer is not None
        self.tokenizer = Tokenizer.from_model(model)
        self._input = InputProcessor(self.tokenizer, info)
        self._states: dict[str, RequestState | PooledState] = {}
        self.answers: dict[str, Answer] = {}

    def add(self, name: str, requested: AnyRequest) -> None:
        request = self.engine_request(name, requested)
        state = (
            PooledState
            if isinstance(requested, PoolingRequest)
            else lambda r: RequestState(r, self.tokenizer)
        )
        self._states[name] = state(request)
        self.answers[name] = Answer()
        refused = self.core.add(request)
        assert refused == [], [output.error for output in refused]

    def engine_request(self, name: str, requested: AnyRequest) -> EngineRequest:
        if isinstance(requested, PoolingRequest):
            request = self._input.process_pooling(requested)
            lora = LoraRequest(name="a") if name.endswith("+lora") else None
            return msgspec.structs.replace(request, request_id=name, lora=lora)
        return msgspec.structs.replace(self._input.process(requested), request_id=name)

    def abort(self, name: str) -> None:
        self._states.pop(name, None)
        self.core.abort(name)
        self.core.check_integrity()

    @property
    def running(self) -> set[str]:
        """Return the requests that have not ended."""
        return set(self._states)

    @property
    def busy(self) -> bool:
        return self.core.has_work

    def step(self) -> None:
        outputs = self.core.step()
        self.core.check_integrity()
        for name in dict.fromkeys(output.request_id for output in outputs):
            state = self._states[name]
            mine = [output for output in outputs if output.request_id == name]
            try:
                result = state.process(mine)
            except (EngineError, InvalidParameter) as error:
                self.answers[name].error = str(error)
                self.abort(name)
                continue
            for index in state.stopped:
                self.core.abort(name, index)
            if state.finished:
                del self._states[name]
            if result is not None:
                self.answers[name].take(result)

    def alone(self, name: str, requested: AnyRequest) -> Answer:
        """Return the results of a request that runs alone."""
        self.add(name, requested)
        for _ in range(1000):
            if not self.busy:
                return self.answers.pop(name)
            self.step()
        raise AssertionError(f"'{name}' does not come to an end")

    def assert_empty(self) -> None:
        """Check that finished requests occupy no cache blocks or memory."""
        core = self.core
        assert core.scheduler.kv.pool.num_used == 0
        assert not self._states
        guided, speculation = core.addon(GuidedDecodingAddon), core.addon(SpeculativeDecoding)
        left = {
            "requests": core.scheduler._sequences_of,
            "queue": list(core.scheduler.waiting),
            "running": core.scheduler.running,
            "sync only": core.scheduler.num_sync_only,
            "compiling": [s for s in guided._compiling if not s.released],
        }
        lora = core.addon(LoraManager)
        if lora is not None:
            left["adapters"] = lora._cache._pins
            left["slots"] = +lora.slots._holders
        assert (speculation.proposer is not None) == self._proposes, "proposing was given up"
        left["drafts without tokens"] = getattr(speculation.proposer, "_pending", None)
        assert {name: found for name, found in left.items() if found} == {}


METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculative": "ngram", "prompt_lookup_min": 1},
    "draft model": {"speculative_model": "{same}", "draft_sample_method": "greedy"},
    "other draft model": {"speculative_model": "{other}", "draft_sample_method": "greedy"},
    "medusa": {"speculative": "medusa", "speculative_model": "{heads}"},
}
WINDOW = {"max_attention_window_size": 14, "sink_token_length": 3}


class Files:
    """The checkpoints, Medusa heads and adapters of the engines."""

    def __init__(self, root: Path, same: Path, other: Path) -> None:
        self.same = same
        outputs = list(np.random.default_rng(0).normal(size=(NUM_HEADS, VOCAB, HIDDEN)))
        heads = write_heads(root / "heads", head_tensors(outputs, scale=0.3, blocks=2))
        self._paths = {"same": same, "other": other, "heads": heads}
        self.adapters = {
            name: str(write_adapter(same, root / name, seed=seed)) for seed, name in enumerate("ab")
        }
        self.alone = cache(self._alone)
        self.catalogue = cache(self._catalogue)
        self._plain = cache(self._open_plain)

    def open(self, runner: str, *parts: dict[str, Any], **options: Any) -> Mixed:
        for part in parts:
            options |= part
        return Mixed(str(self.same), runner=runner, **self.engine_options(options))

    def engine_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options with those that name files of this object."""
        if "speculative_model" in options:
            path = options["speculative_model"].format(**self._paths)
            options = {**options, "speculative_model": path}
        own = {"adaptive_speculation": False, "lora_modules": self.adapters, "max_loras": 1}
        return {"dtype": "float32", **own, **options}

    def _open_plain(self, runner: str, windowed: bool) -> Mixed:
        return self.open(runner, WINDOW if windowed else {}, num_blocks=64, enable_prefix_caching=False)

    def _catalogue(self, runner: str = "native", windowed: bool = False) -> dict[str, AnyRequest]:
        requested = with_prompt("long", {"ignore_eos": True})
        return catalogue(self._plain(runner, windowed).alone("known", requested).tokens[0])

    def _alone(self, name: str, runner: str, windowed: bool) -> Answer:
        return self._plain(runner, windowed).alone(name, self.catalogue(runner, windowed)[name])
