"""A language model over tensors."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from neso.frontends.openai.choices import merge
from neso.frontends.openai.tensor_models import input_tensors as sampling_inputs
from neso.frontends.openai.tensor_models import request_tensors as text_face
from neso.frontends.openai.tensor_models.request_tensors import LORA_NAME, LORA_TASK
from neso.frontends.openai.tensor_models.response_text import (
    OutputSequence,
    OutputText,
    TextResponse,
    TokenLimit,
)
from neso.generation import (
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    PromptTooLong,
    SamplingDefaults,
    SamplingParams,
    TokenizerLike,
    Usage,
    encode_text,
)
from neso.server.config.model_config import string_parameter
from neso.server.errors import ErrorCode, ServerError
from neso.server.inference_request import InferenceRequest

if TYPE_CHECKING:
    from neso.server.model import Model
    from neso.server.tracing import Trace


_AT_FAULT = re.compile(r"(?:^|, )(\w+): (.+)", re.DOTALL)
_PROMPT = ("text_input", "input_ids", "input_lengths")


def to_parameter_error(error: ServerError, sampling: SamplingParams) -> Exception:
    """The error, about the field that made the input which it names, as `NAME: …`; else as it is."""
    named = _AT_FAULT.search(error.message) if error.code is ErrorCode.INVALID_ARG else None
    field = None if named is None else _field(named[1], sampling)
    return error if named is None or field is None else InvalidParameter(field, named[2])


def _field(name: str, sampling: SamplingParams) -> str | None:
    if name in _PROMPT:
        return "prompt"
    guide = sampling.guided_decoding
    if name in (*sampling_inputs.GUIDE, *sampling_inputs.GUIDE_TYPE):
        return None if guide is None else guide.field
    if name in sampling_inputs.STOP:
        return "stop"
    if name in (*LORA_NAME, *LORA_TASK):
        return "model"  # whose name has the adapter's in it
    return next((field for field, names in sampling_inputs.SCALARS.items() if name in names), None)


UNLIMITED_LENGTH = 2**31 - 1
"""Stands for the context length of a model that does not tell it."""
_TRUE = ("true", "t", "yes", "1")
"""Texts of a parameter that is set."""


class _Prompt(NamedTuple):
    """`num_tokens` 0 where nobody needs to know. An answer that begins with one of `echoes` repeats the prompt."""

    text: str
    num_tokens: int
    echoes: tuple[str, ...]


class TensorLanguageModel:
    """`LanguageModel` of a model that takes `text_input` and gives `text_output`.

    Each sequence is an inference request. `tokenizer` is None where there is none: then tokens are counted by the model
    or not at all. `default_max_tokens` is for requests without a limit to models of unknown context length.
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
        self.default_sampling = SamplingDefaults()  # its inputs have defaults of their own
        self._model = model
        self._tokenizer = tokenizer
        self._default_max_tokens = default_max_tokens
        self._accumulates = string_parameter(model.config, "accumulate_tokens").lower() in _TRUE
        self._told_limit = text_face.accepts_max_tokens(model.signature)

    async def generate(
        self, request: GenerationRequest, trace: Trace | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        """See `LanguageModel.generate`. Raises `ServerError` too: what the model answers."""
        text = self._prompt_text(request)
        count = await self._count_prompt(request, text)
        samplings = self._samplings(request.sampling, count)
        prompt = _Prompt(text, count, await self._echoes(text))
        runs = [self._run(request, prompt, sampling, trace) for sampling in samplings]
        async with aclosing(runs[0] if len(runs) == 1 else self._together(runs, count)) as outputs:
            async for output in outputs:
                yield output

    async def _together(
        self, runs: list[AsyncGenerator[GenerationOutput, None]], count: int
    ) -> AsyncGenerator[GenerationOutput, None]:
        """The outputs of several sequences as those of one request."""
        usages = [Usage(count)] * len(runs)
        ended = [False] * len(runs)
        async with aclosing(merge(runs)) as outputs:
            async for index, output in outputs:
                usages[index], ended[index] = output.usage, output.finished
                yield replace(
                    output,
                    outputs=[replace(delta, index=index) for delta in output.deltas],
                    usage=_sum(usages),
                    finished=all(ended),
                    num_sequences=len(runs),
                )

    def _prompt_text(self, request: GenerationRequest) -> str:
        """The prompt as text; tokens where text can stand for them. Raises `InvalidParameter`."""
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
        raise InvalidParameter("prompt", "the model takes text, and no text has these tokens")

    async def _count_prompt(self, request: GenerationRequest, prompt: str) -> int:
        """Tokens of the prompt; 0 where nobody needs to know or can tell. Raises `InvalidParameter`."""
        asks = (
            request.sampling.max_tokens is None and self._told_limit and self.max_model_len < UNLIMITED_LENGTH
        )
        may_be_long = len(prompt.encode(errors="replace")) >= self.max_model_len  # a token is a byte or more
        counts = "num_input_tokens" in self._model.signature.outputs
        if self._tokenizer is None or (counts and not asks and not may_be_long):
            return 0
        count = await self._count(prompt, request)
        if count >= self.max_model_len:
            raise PromptTooLong(count, self.max_model_len)
        return count

    async def _count(self, prompt: str, request: GenerationRequest) -> int:
        assert self._tokenizer is not None
        if not isinstance(request.prompt, str):
            return len(request.prompt)
        tokens = await encode_text(self._tokenizer, prompt, add_special_tokens=request.add_special_tokens)
        return len(tokens)

    def _samplings(self, asked: SamplingParams, num_prompt_tokens: int) -> list[SamplingParams]:
        """Those of each sequence, with a limit, and with seeds of their own where there are several.

        Without one a model might take the same for all of them.
        """
        if asked.uses_beams and asked.n > 1:
            raise InvalidParameter("n", "the model gives the best of its beams only")
        changes: dict[str, int | None] = {"n": 1}
        if asked.max_tokens is None and self._told_limit:
            changes["max_tokens"] = max(self._room(num_prompt_tokens), asked.min_tokens)
        seeds: list[int | None] = [asked.seed]
        if asked.n > 1 and (asked.seed is not None or text_face.accepts_seed(self._model.signature)):
            first = random.getrandbits(31) if asked.seed is None else asked.seed
            seeds = [_wrapped(first + index) for index in range(asked.n)]
        elif asked.n > 1:
            seeds = [None] * asked.n
        return [msgspec.structs.replace(asked, **changes, seed=seed) for seed in seeds]

    def _room(self, num_prompt_tokens: int) -> int:
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
        """One sequence. Ending it early cancels the inference request."""
        signature = self._model.signature
        # A model that does not know where to stop is followed, so that it can be stopped; tokens are best told apart
        # when they come one by one.
        wants_stream = (
            request.stream
            or (bool(sampling.stop) and not text_face.accepts_stop(signature))
            or sampling.logprobs is not None
        )
        inputs = text_face.request_tensors(
            signature, request, prompt.text, sampling, stream=self._model.decoupled and wants_stream
        )
        sequence = self._sequence(request, prompt, sampling)
        stream = self._model.submit(
            InferenceRequest(
                self._model.name,
                inputs,
                id=request.request_id,
                requested_outputs=text_face.requested_outputs(signature, inputs),
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
        if not self._told_limit and sampling.max_tokens is not None and self._tokenizer is not None:
            limit = TokenLimit(self._tokenizer, sampling.max_tokens)
        return OutputSequence(request.request_id, prompt.num_tokens, sampling, text, self._tokenizer, limit)

    async def _echoes(self, prompt: str) -> tuple[str, ...]:
        """How the model may repeat the prompt: as it is, or as its tokens without the special ones say it."""
        if text_face.can_exclude_prompt(self._model.signature):
            return ()
        if self._tokenizer is None:
            return (prompt,)
        tokens = await encode_text(self._tokenizer, prompt, add_special_tokens=False)
        return prompt, self._tokenizer.decode(tokens)


def _sum(usages: list[Usage]) -> Usage:
    return Usage(
        max(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages)
    )


def _wrapped(seed: int) -> int:
    """Within the range of seeds."""
    return seed if seed < 2**64 else seed - 2**64
