"""Sampling state of one sequence: random numbers, token counts and bans."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from neso.engine.core.request import EngineRequest
from neso.engine.core.sequence import Sequence as EngineSequence
from neso.generation.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Words = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class SeenNgrams:
    """The n-grams of length `size` that a sequence contains, for no_repeat_ngram_size."""

    size: int
    followers: dict[tuple[int, ...], set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, size: int, token_ids: list[int]) -> SeenNgrams:
        seen = cls(size)
        for end in range(size, len(token_ids) + 1):
            seen._add(token_ids, end)
        return seen

    def record(self, token_ids: list[int]) -> None:
        """Add the n-gram that ends with the last token."""
        if len(token_ids) >= self.size:
            self._add(token_ids, len(token_ids))

    def banned(self, token_ids: list[int]) -> set[int]:
        """Return the tokens that would repeat an n-gram."""
        start = len(token_ids) - self.size + 1
        return self.followers.get(tuple(token_ids[start:]), set()) if start >= 0 else set()

    def copy(self) -> SeenNgrams:
        return SeenNgrams(self.size, {start: set(ends) for start, ends in self.followers.items()})

    def _add(self, token_ids: list[int], end: int) -> None:
        start = tuple(token_ids[end - self.size : end - 1])
        self.followers.setdefault(start, set()).add(token_ids[end - 1])


@dataclass(slots=True)
class TokenBans:
    """Banned tokens: bad words, repeated n-grams, and tokens outside the allowed set.

    - single: bad words of one token; longer: the other bad words
    - allowed: the only tokens that are allowed, if not None
    - history: prompt and output tokens
    """

    single: npt.NDArray[np.int64]
    longer: Words
    allowed: npt.NDArray[np.int64] | None
    ngrams: SeenNgrams | None
    history: list[int]

    @classmethod
    def create(
        cls, bad_words: Words, allowed: tuple[int, ...] | None, ngram_size: int, prompt: list[int]
    ) -> TokenBans | None:
        """Return the bans of a sequence; None if no token is banned."""
        if not (bad_words or ngram_size or allowed is not None):
            return None
        return cls(
            single=np.array([word[0] for word in bad_words if len(word) == 1], np.int64),
            longer=tuple(word for word in bad_words if len(word) > 1),
            allowed=None if allowed is None else np.unique(np.array(allowed, np.int64)),
            ngrams=SeenNgrams.of(ngram_size, prompt) if ngram_size else None,
            history=list(prompt),
        )

    def record(self, token_id: int) -> None:
        """Add a sampled token to the history."""
        self.history.append(token_id)
        if self.ngrams is not None:
            self.ngrams.record(self.history)

    def banned(self) -> npt.NDArray[np.int64]:
        """Return the banned tokens int64[N], without those outside the allowed set; a token may be there twice."""
        found = [word[-1] for word in self.longer if self.history[1 - len(word) :] == list(word[:-1])]
        if self.ngrams is not None:
            found += self.ngrams.banned(self.history)
        return np.concatenate([self.single, np.array(found, np.int64)])

    def copy(self) -> TokenBans:
        ngrams = None if self.ngrams is None else self.ngrams.copy()
        return TokenBans(self.single, self.longer, self.allowed, ngrams, list(self.history))


_UNIFORMS_AT_ONCE = 16


@dataclass(slots=True)
class SamplingState:
    """Random numbers and token counts of one sequence.

    Each sampled token takes one random number of the sequence's own generator: with a seed, the result depends neither
    on the other sequences of the batch nor on preemption.

    - output_counts: only if penalties need it
    - temperature: 0 if greedy; top_p: of the next token
    - returned: unused random numbers of rejected drafts, used for the next tokens
    """

    params: SamplingParams
    temperature: float
    top_k: int
    min_p: float
    uniforms: Iterator[float]
    suppressed_ids: tuple[int, ...]
    prompt_ids: frozenset[int]
    dense_bias: npt.NDArray[np.float32] | None
    bans: TokenBans | None
    counts_tokens: bool
    tracks_tokens: bool
    always_changes_logits: bool
    needs_scores: bool
    top_p: float
    output_counts: dict[int, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    returned: deque[float] = field(default_factory=deque)

    @classmethod
    def create(cls, request: EngineRequest, prompt: list[int], index: int = 0) -> SamplingState:
        """Create the state of sequence `index` of a request; `prompt` has the prompt tokens without placeholders.

        Tokens that end the sequence are banned until there are `min_tokens` tokens.
        """
        params = request.sampling
        penalized = params.repetition_penalty != 1.0
        counts_tokens = bool(penalized or params.presence_penalty or params.frequency_penalty)
        bans = TokenBans.create(
            request.bad_words, params.allowed_token_ids, params.no_repeat_ngram_size, prompt
        )
        bias = np.frombuffer(params.embedding_bias, np.float32) if params.embedding_bias else None
        return cls(
            params=params,
            temperature=0.0 if params.greedy else params.temperature,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            uniforms=_uniforms(params.seed, index),
            suppressed_ids=tuple(request.end_token_ids) if params.min_tokens else (),
            prompt_ids=frozenset(prompt) if penalized else frozenset(),
            dense_bias=bias,
            bans=bans,
            counts_tokens=counts_tokens,
            tracks_tokens=counts_tokens or bans is not None or params.top_p_decay < 1,
            always_changes_logits=bool(
                counts_tokens or params.logit_bias or bias is not None or bans is not None
            ),
            needs_scores=params.needs_token_scores,
            top_p=params.top_p,
        )

    def uniform(self) -> float:
        """Return the next random number, in [0, 1)."""
        return self.returned.popleft() if self.returned else next(self.uniforms)

    def return_unused(self, uniforms: list[float]) -> None:
        """Return unused random numbers; they are used first by `uniform`."""
        self.returned.extendleft(reversed(uniforms))

    def after(self, token_ids: Sequence[int], uniform: float) -> SamplingState:
        """Return a copy of the state after these tokens; `uniform` is its next random number."""
        child = self._copy()
        child.returned = deque((uniform,))
        for token_id in token_ids:
            child.record(token_id)
        return child

    def record(self, token_id: int) -> None:
        """Count a sampled token."""
        self.num_output_tokens += 1
        if self.tracks_tokens:
            self._track(token_id)

    def _track(self, token_id: int) -> None:
        if self.counts_tokens:
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1
        if self.bans is not None:
            self.bans.record(token_id)
        if self.params.top_p_decay < 1:
            self._decay_top_p(token_id)

    def fork(self, token_id: int) -> SamplingState:
        """Return the state of a fork that continues with `token_id`."""
        child = self._copy()
        child.record(token_id)
        return child

    def _copy(self) -> SamplingState:
        return replace(
            self,
            output_counts=dict(self.output_counts),
            bans=None if self.bans is None else self.bans.copy(),
            returned=deque(self.returned),
        )

    def penalized_tokens(self) -> tuple[Int32Array, Row]:
        """Return the tokens int32[N] that penalties apply to, and how often each is in the output, float32[N].

        Tokens that are only in the prompt are there if a repetition penalty needs them.
        """
        counts = self.output_counts
        only_prompt = self.prompt_ids.difference(counts)
        tokens = np.fromiter([*counts, *only_prompt], np.int32, len(counts) + len(only_prompt))
        times = np.zeros(len(tokens), np.float32)
        times[: len(counts)] = np.fromiter(counts.values(), np.float32, len(counts))
        return tokens, times

    @property
    def needs_known_tokens(self) -> bool:
        """Whether sampling the next token requires that the host knows all tokens before it."""
        return self.changes_logits or self.params.top_p_decay < 1

    @property
    def changes_logits(self) -> bool:
        """Whether penalties, biases or bans change this sequence's logits."""
        return self.always_changes_logits or (
            bool(self.suppressed_ids) and self.num_output_tokens < self.params.min_tokens
        )

    def _decay_top_p(self, token_id: int) -> None:
        params = self.params
        if token_id == params.top_p_reset_ids:
            self.top_p = params.top_p
        else:
            self.top_p = max(self.top_p * params.top_p_decay, params.top_p_min)


def state_of(sequence: EngineSequence) -> SamplingState:
    """Return the sampling state of a sequence; create it on first use."""
    state = sequence.sampling_state
    if state is None:
        state = SamplingState.create(sequence.request, sequence.text_token_ids, sequence.index)
        for token_id in sequence.request.output_token_ids:  # sampled by another engine
            if state.temperature:
                state.uniform()
            state.record(token_id)
        sequence.sampling_state = state
    return state


def _uniforms(seed: int | None, index: int) -> Iterator[float]:
    """Yield random numbers in [0, 1). The generator is created at the first draw; greedy sequences need none."""
    generator = np.random.default_rng(None if seed is None else [seed % 2**64, index])
    while True:
        yield from generator.random(_UNIFORMS_AT_ONCE).tolist()
