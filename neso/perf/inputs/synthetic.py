"""Requests with synthetic content: prompts, sessions, texts of embeddings, queries with passages, images."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from neso.engine.text.tokenizer import Tokenizer
from neso.generation import InvalidParameter
from neso.perf.errors import PerfError
from neso.perf.inputs.images import ImageMaker
from neso.perf.inputs.lengths import LengthMix, Lengths, parse_length_mix, single_mix
from neso.perf.inputs.options import InputOptions
from neso.perf.inputs.synthetic_text import SyntheticText, load_tokenizer
from neso.perf.requests import PerfRequest

EMBEDDINGS = ("embeddings", "nim_embeddings")
RANKINGS = ("rankings", "hf_tei_rankings", "nim_rankings", "cohere_rankings")
CHAT = ("chat", "vision", "multimodal", "responses")

_log = logging.getLogger("neso.perf")


def endpoint_kind(endpoint_type: str) -> str:
    """Return the name of an endpoint type with underscores: `hf-tei-rankings` is `hf_tei_rankings`."""
    return endpoint_type.replace("-", "_").lower()


def tokenizer_for(options: InputOptions, models: tuple[str, ...]) -> Tokenizer:
    """Load the tokenizer of the options, else of the model, else of the bundled model with a warning."""
    if options.tokenizer:
        return load_tokenizer(options.tokenizer, options.tokenizer_revision)
    try:
        return load_tokenizer(models[0] if models else "neso-pilot", options.tokenizer_revision)
    except PerfError as error:
        _log.warning(
            "prompt lengths are counted by the tokenizer of neso-pilot (%s); name another one by --tokenizer",
            error,
        )
        return load_tokenizer("neso-pilot")


@dataclass(frozen=True)
class SyntheticSource:
    """Synthetic requests for one kind of endpoint. Each call of `requests` yields the same requests."""

    options: InputOptions
    kind: str
    models: tuple[str, ...] = ()

    def requests(self) -> Iterator[PerfRequest]:
        """Yield `num_entries` requests, or the turns of `num_sessions` sessions."""
        if self.kind in EMBEDDINGS:
            yield from self._each(self._embeddings)
        elif self.kind in RANKINGS:
            yield from self._each(self._ranking)
        else:
            yield from _Prompts(self.options, self.kind, self.tokenizer).requests()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that counts the lengths."""
        return tokenizer_for(self.options, self.models)

    def _each(
        self, make: Callable[[SyntheticText, np.random.Generator], PerfRequest]
    ) -> Iterable[PerfRequest]:
        rng = np.random.default_rng(self.options.random_seed)
        text = SyntheticText(self.tokenizer, rng)
        return (make(text, rng) for _ in range(self.options.num_entries))

    def _embeddings(self, text: SyntheticText, rng: np.random.Generator) -> PerfRequest:
        lengths = [input_lengths(self.options).sample(rng) for _ in range(self.options.batch_size_text)]
        return PerfRequest(texts=[text.text(length) for length in lengths], input_tokens=sum(lengths))

    def _ranking(self, text: SyntheticText, rng: np.random.Generator) -> PerfRequest:
        options = self.options
        query = Lengths(options.rankings_query_tokens_mean, options.rankings_query_tokens_stddev).sample(rng)
        number = Lengths(options.rankings_passages_mean, options.rankings_passages_stddev).sample(rng)
        passage = Lengths(options.rankings_passage_tokens_mean, options.rankings_passage_tokens_stddev)
        lengths = [passage.sample(rng) for _ in range(number)]
        return PerfRequest(
            query=text.text(query),
            passages=[text.text(length) for length in lengths],
            input_tokens=query + sum(lengths),
        )


def input_lengths(options: InputOptions) -> Lengths:
    """Return the distribution of prompt lengths."""
    return Lengths(options.input_tokens_mean, options.input_tokens_stddev, options.random_range_ratio)


def length_mix(options: InputOptions) -> LengthMix:
    """Return the distribution of prompt and output lengths."""
    if options.seq_dist is not None:
        return parse_length_mix(options.seq_dist)
    output = None
    if options.output_tokens_mean is not None:
        output = Lengths(options.output_tokens_mean, options.output_tokens_stddev, options.random_range_ratio)
    return single_mix(input_lengths(options), output)


def gives_output_length(options: InputOptions) -> bool:
    """Whether the options give an output length for requests of files and datasets."""
    return options.output_tokens_mean is not None or options.seq_dist is not None


def with_output_length(request: PerfRequest, output: int | None, options: InputOptions) -> PerfRequest:
    """Return the request with an output length."""
    return replace(
        request, max_tokens=output, min_tokens=output if options.output_tokens_deterministic else None
    )


def system_prompt(options: InputOptions, text: SyntheticText) -> str:
    """Return the system prompt of all requests: given, of a file, or synthetic; "" for none."""
    given = [
        bool(options.system_prompt),
        bool(options.system_prompt_file),
        options.shared_system_prompt_length > 0,
    ]
    if sum(given) > 1:
        raise PerfError(
            "give only one of --system-prompt, --system-prompt-file and --shared-system-prompt-length"
        )
    if options.system_prompt_file:
        try:
            return Path(options.system_prompt_file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise PerfError(f"--system-prompt-file {options.system_prompt_file}: {error}") from None
    return options.system_prompt or text.text(options.shared_system_prompt_length)


class _Prompts:
    """Prompts and sessions of synthetic text, with prefixes, a system prompt and images."""

    def __init__(self, options: InputOptions, kind: str, tokenizer: Tokenizer) -> None:
        if bool(options.num_prefix_prompts) != bool(options.prefix_prompt_length):
            raise PerfError("--num-prefix-prompts and --prefix-prompt-length must be given together")
        self._options = options
        self._tokenizer = tokenizer
        self._rng = np.random.default_rng(options.random_seed)
        self._text = SyntheticText(tokenizer, self._rng)
        self._lengths = length_mix(options)
        self._prefixes = [
            self._text.text(options.prefix_prompt_length) for _ in range(options.num_prefix_prompts)
        ]
        self._system = system_prompt(options, self._text)
        self._chat = kind in CHAT
        if self._system and not self._chat:
            # Endpoints without messages get the system prompt as the start of the prompt.
            self._prefixes = [f"{self._system} {prefix}".rstrip() for prefix in self._prefixes or [""]]
            self._system = ""
        width = Lengths(options.image_width_mean, options.image_width_stddev)
        height = Lengths(options.image_height_mean, options.image_height_stddev)
        self._images = ImageMaker(width, height, options.image_format)
        self._num_images = options.batch_size_image or int(kind in ("vision", "multimodal"))

    def requests(self) -> Iterator[PerfRequest]:
        options = self._options
        if options.session_turns_mean == 1 and not options.session_turns_stddev:
            for _ in range(options.num_entries):
                yield self._turn("", 0)
            return
        turns = Lengths(options.session_turns_mean, options.session_turns_stddev)
        delay = Lengths(options.session_turn_delay_mean, options.session_turn_delay_stddev, minimum=0)
        for number in range(options.num_sessions or options.num_entries):
            for turn in range(turns.sample(self._rng)):
                request = self._turn(f"session-{number}", turn)
                if turn:
                    request.delay_ms = delay.sample(self._rng) * options.session_delay_ratio
                yield request

    def _turn(self, session: str, turn: int) -> PerfRequest:
        options = self._options
        tokens, output = self._lengths.sample(self._rng)
        start = ""
        if turn == 0:
            if self._prefixes:
                start = self._prefixes[int(self._rng.integers(len(self._prefixes)))]
            if options.user_context_prompt_length:
                count = self._text.count(start) + options.user_context_prompt_length
                start = self._text.text(count, after=start)
        system = self._system if turn == 0 else ""
        if options.apply_chat_template and turn == 0:
            text, total = self._templated_prompt(start, tokens, system)
        else:
            total = self._text.count(start) + tokens
            text = self._text.text(total, after=start)
            total += self._text.count(system) if system else 0
        return PerfRequest(
            text=text,
            system=system,
            input_tokens=total if turn == 0 else None,
            max_tokens=output,
            min_tokens=output if options.output_tokens_deterministic else None,
            images=[self._images.data_url(self._rng) for _ in range(self._num_images)] or None,
            session=session,
            turn=turn,
        )

    def _templated_prompt(self, start: str, tokens: int, system: str) -> tuple[str, int]:
        """Return a prompt that has `tokens` tokens with its template, beside `start` and `system`, and its total."""
        count = self._templated(system)
        total = tokens + self._text.count(start) + (self._text.count(system) if system else 0)
        total = max(total, count(start) + 1)
        return self._text.text(total, after=start, count=count), total

    def _templated(self, system: str) -> Callable[[str], int]:
        """Return the number of tokens of a user message as the model sees it."""
        if not self._chat:
            return lambda text: len(self._tokenizer.encode(text))
        head = [{"role": "system", "content": system}] if system else []

        def count(text: str) -> int:
            try:
                prompt = self._tokenizer.apply_chat_template([*head, {"role": "user", "content": text}])
            except InvalidParameter as error:
                raise PerfError(f"--apply-chat-template: {error}") from None
            return len(self._tokenizer.encode(prompt, add_special_tokens=False))

        return count
