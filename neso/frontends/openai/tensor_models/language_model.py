"""A language model over a model with text tensors."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from neso.frontends.openai.choices import merge
from neso.frontends.openai.tensor_models import input_tensors, request_tensors
from neso.frontends.openai.tensor_models.request_tensors import LORA_NAME, LORA_TASK
from neso.frontends.openai.tensor_models.response_text import (
    OutputSequence,
    OutputText,
    TextResponse,
    TokenLimit,
)
from neso.generation import (
    UNLIMITED_LENGTH,
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    PromptTooLong,
    SamplingDefaults,
    SamplingParams,
    TokenizerLike,
    Usage,
    count_tokens,
    encode_text,
)
from neso.server.config.model_config import parse_bool, string_parameter
from neso.server.errors import ErrorCode, ServerError
from neso.server.inference_request import InferenceRequest

if TYPE_CHECKING:
    from neso.server.model import Model
    from neso.server.tracing import Trace


_NAMED_INPUT = re.compile(r"(?:^|, )(\w+): (.+)", re.DOTALL)
_PROMPT = ("text_input", "input_ids", "input_lengths")


def to_parameter_error(error: ServerError, sampling: SamplingParams) -> Exception:
    """Return `InvalidParameter` for a message `INPUT: …` about an input derived from a request field, else `error`."""
    named = _NAMED_INPUT.search(error.message) if error.code is ErrorCode.INVALID_ARG else None
    field = None if named is None else _field(named[1], sampling)
    return error if named is None or field is None else InvalidParameter(field, named[2])


def _field(name: str, sampling: SamplingParams) -> str | None:
    if name in _PROMPT:
        return "prompt"
    guide = sampling.guided_decoding
    if name in (*input_tensors.GUIDE, *input_tensors.GUIDE_TYPE):
        return None if guide is None else guide.field
    if name in input_tensors.STOP:
        return "stop"
    if name in (*LORA_NAME, *LORA_TASK):
        return "model"  # its name includes the adapter's
    return next((field for field, names in input_tensors.SCALARS.items() if name in names), None)


MAX_ECHOED = 1 << 20
"""Characters of a prompt that are tokenized as a whole, to recognize it in the output of the model."""


class _Prompt(NamedTuple):
    """`num_tokens`: 0 if not counted. `echoes`: forms in which the output may repeat the prompt."""

    text: str
    num_tokens: int
    echoes: tuple[str, ...]


class TensorLanguageModel:
    """`LanguageModel` over a model with the tensors `text_input` and `text_output`; a sequence is an inference request.

    tokenizer: counts tokens if the model does not; None if unknown.
    default_max_tokens: for requests without `max_tokens` if the context length is unknown.
    """

    def __init__(
        self,
        model: Model,
        text: TokenizerLike,
        tokenizer: TokenizerLike | None,
        max_model_len: int,
        default_max_tokens: int,
    ) -> None:
        self.text = text
        self.max_model_len = max_model_len
        self.default_sampling = SamplingDefaults()  # the model applies its own defaults
        self._model = model
        self._tokenizer = tokenizer
        self._default_max_tokens = default_max_tokens
        self._accumulates = bool(parse_bool(string_parameter(model.config, "accumulate_tokens")))
        self._accepts_max_tokens = request_tensors.accepts_max_tokens(model.signature)

    async def generate(
        self, request: GenerationRequest, trace: Trace | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """See `LanguageModel.generate`. Also raises the model's `ServerError`."""
        text = self._prompt_text(request)
        count = await self._count_prompt(request, text)
        samplings = self._samplings(request.sampling, count)
        prompt = _Prompt(text, count, await self._echoes(text))
        runs = [self._run(request, prompt, sampling, trace) for sampling in samplings]
        async with aclosing(runs[0] if len(runs) == 1 else self._merged(runs, count)) as outputs:
            async for output in outputs:
                yield output

    async def _merged(
        self, runs: list[AsyncGenerator[GenerationOutput, None]], count: int
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Yield the outputs of several sequences, merged into outputs of one request."""
        usages = [Usage(count)] * len(runs)
        finished = [False] * len(runs)
        async with aclosing(merge(runs)) as outputs:
            async for index, output in outputs:
                usages[index], finished[index] = output.usage, output.finished
                yield replace(
                    output,
                    outputs=[replace(delta, index=index) for delta in output.deltas],
                    usage=_total(usages),
                    finished=all(finished),
                    num_sequences=len(runs),
                )

    def _prompt_text(self, request: GenerationRequest) -> str:
        """Return the prompt as text. Raises `InvalidParameter` for token ids that correspond to no text."""
        if isinstance(request.prompt, str):
            return request.prompt
        if self._tokenizer is None:
            raise InvalidParameter("prompt", "the model takes text, and no tokenizer is known for it")
        if len(request.prompt) >= self.max_model_len:
            raise PromptTooLong(len(request.prompt), self.max_model_len)
        text = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
        for special in (False, True):
            if self._tokenizer.encode(text, add_special_tokens=special) == request.prompt:
                return text
        raise InvalidParameter("prompt", "the model takes text, and these tokens cannot be decoded to text")

    async def _count_prompt(self, request: GenerationRequest, prompt: str) -> int:
        """Return the number of prompt tokens; 0 if unknown or not needed. Raises `InvalidParameter`."""
        needs_count = (
            request.sampling.max_tokens is None
            and self._accepts_max_tokens
            and self.max_model_len < UNLIMITED_LENGTH
        )
        may_be_long = (
            len(prompt.encode(errors="replace")) >= self.max_model_len
        )  # a token has at least one byte
        counts = "num_input_tokens" in self._model.signature.outputs
        if self._tokenizer is None or (counts and not needs_count and not may_be_long):
            return 0
        count = await self._count(prompt, request)
        if count >= self.max_model_len:
            raise PromptTooLong(count, self.max_model_len)
        return count

    async def _count(self, prompt: str, request: GenerationRequest) -> int:
        assert self._tokenizer is not None
        if not isinstance(request.prompt, str):
            return len(request.prompt)
        special = request.add_special_tokens
        if self.max_model_len >= UNLIMITED_LENGTH and len(prompt) > MAX_ECHOED:
            return await asyncio.to_thread(count_tokens, self._tokenizer, prompt, add_special_tokens=special)
        tokens = await encode_text(
            self._tokenizer, prompt, add_special_tokens=special, max_model_len=self.max_model_len
        )
        return len(tokens)

    def _samplings(self, sampling: SamplingParams, num_prompt_tokens: int) -> list[SamplingParams]:
        """Return sampling parameters per sequence, with `max_tokens`, and with distinct seeds for several sequences.

        Without a seed, a model might use the same default seed for all of them.
        """
        if sampling.uses_beams and sampling.n > 1:
            raise InvalidParameter("n", "the model returns only its best beam")
        changes: dict[str, int | None] = {"n": 1}
        if sampling.max_tokens is None and self._accepts_max_tokens:
            changes["max_tokens"] = max(self._max_output(num_prompt_tokens), sampling.min_tokens)
        seeds: list[int | None] = [sampling.seed]
        if sampling.n > 1 and (
            sampling.seed is not None or request_tensors.accepts_seed(self._model.signature)
        ):
            first = random.getrandbits(31) if sampling.seed is None else sampling.seed
            seeds = [_wrap_seed(first + index) for index in range(sampling.n)]
        elif sampling.n > 1:
            seeds = [None] * sampling.n
        return [msgspec.structs.replace(sampling, **changes, seed=seed) for seed in seeds]

    def _max_output(self, num_prompt_tokens: int) -> int:
        if self.max_model_len >= UNLIMITED_LENGTH or self._tokenizer is None:
            return self._default_max_tokens
        return self.max_model_len - num_prompt_tokens

    async def _run(
        self,
        request: GenerationRequest,
        prompt: _Prompt,
        sampling: SamplingParams,
        trace: Trace | None,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Generate one sequence. Closing the generator cancels the inference request."""
        signature = self._model.signature
        # Streaming is also needed to stop a model without input for stop strings, and for log probabilities per token.
        wants_stream = (
            request.stream
            or (bool(sampling.stop) and not request_tensors.accepts_stop(signature))
            or sampling.logprobs is not None
        )
        inputs = request_tensors.request_tensors(
            signature, request, prompt.text, sampling, stream=self._model.decoupled and wants_stream
        )
        sequence = self._sequence(request, prompt, sampling)
        stream = self._model.submit(
            InferenceRequest(
                self._model.name,
                inputs,
                id=request.request_id,
                requested_outputs=request_tensors.requested_outputs(signature, inputs),
                priority=max(request.priority, 0),
                trace=trace,
            )
        )
        try:
            async for response in stream:
                output = sequence.read(TextResponse.of(response), final=response.final)
                if output is not None:
                    yield output
                if sequence.done:
                    return
        except ServerError as error:
            raise to_parameter_error(error, sampling) from None
        finally:
            stream.cancel()

    def _sequence(
        self, request: GenerationRequest, prompt: _Prompt, sampling: SamplingParams
    ) -> OutputSequence:
        text = OutputText(
            sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            prompts=prompt.echoes,
            accumulates=self._accumulates,
        )
        limit = None
        if not self._accepts_max_tokens and sampling.max_tokens is not None and self._tokenizer is not None:
            limit = TokenLimit(self._tokenizer, sampling.max_tokens)
        return OutputSequence(request.request_id, prompt.num_tokens, sampling, text, self._tokenizer, limit)

    async def _echoes(self, prompt: str) -> tuple[str, ...]:
        """Return the forms in which the output may repeat the prompt: as sent, or decoded without special tokens."""
        if request_tensors.can_exclude_prompt(self._model.signature):
            return ()
        if self._tokenizer is None or len(prompt) > MAX_ECHOED:
            return (prompt,)
        tokens = await encode_text(self._tokenizer, prompt, add_special_tokens=False)
        return prompt, self._tokenizer.decode(tokens)


def _total(usages: list[Usage]) -> Usage:
    return Usage(
        max(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages)
    )


def _wrap_seed(seed: int) -> int:
    """Wrap to 64 bits."""
    return seed if seed < 2**64 else seed - 2**64
