"""A language model with scripted output and a real tokenizer, and a backend that serves it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    PromptTooLong,
    SamplingDefaults,
    TokenLogprobs,
    Usage,
)
from neso.server.backend import Backend
from neso.server.inference_response import ResponseStream

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello there, how are you today?"]


@cache
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer; prompts begin with "<s>", outputs end with "</s>"."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


class ScriptedText:
    """`TokenizerLike` over that tokenizer, with a chat template in plain Python."""

    has_chat_template = True
    chat_template_source = ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
        return [0, *ids] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(tokenizer().decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        if messages[0]["role"] == "tool":
            raise InvalidParameter("messages", "a tool cannot begin")
        lines = [json.dumps(message) for message in messages]
        if tools is not None:
            lines.insert(0, "tools: " + json.dumps(tools))
        if variables:
            lines.append("variables: " + json.dumps(variables))
        return "\n".join(lines) + ("\nassistant:" if add_generation_prompt else "")


class ScriptedModel:
    """Generates `reply(request, choice)`, one token per output and choice.

    Raises `error` after `fail_after` tokens. With `hold` it blocks after the first token.
    """

    def __init__(self, reply: str | Callable[[GenerationRequest, int], str] = "hello there") -> None:
        self.reply = (lambda request, choice: reply) if isinstance(reply, str) else reply
        self.text = ScriptedText()
        self.max_model_len = 1000
        self.default_sampling = SamplingDefaults()
        self.error: Exception | None = None
        self.fail_after = 0
        self.final_reason: FinishReason | None = None
        self.hold = False
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.ended: list[str] = []

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        self.requests.append(request)
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = self.text.encode(prompt, add_special_tokens=request.add_special_tokens)
        if len(prompt) >= self.max_model_len:
            raise PromptTooLong(len(prompt), self.max_model_len)
        finished = False
        try:
            async for output in self._outputs(request, prompt):
                yield output
            finished = True
        finally:
            (self.ended if finished else self.aborted).append(request.request_id)

    async def _outputs(
        self, request: GenerationRequest, prompt: list[int]
    ) -> AsyncIterator[GenerationOutput]:
        sampling = request.sampling
        choices = [_ScriptedChoice(self, request, choice) for choice in range(sampling.n)]
        made = 0
        while any(not choice.done for choice in choices):
            if self.error is not None and made >= self.fail_after:
                raise self.error
            deltas = [choice.next() for choice in choices if not choice.done]
            first, made = made == 0, made + len(deltas)
            yield GenerationOutput(
                request.request_id,
                deltas,
                Usage(len(prompt), made, cached_tokens=min(3, len(prompt))),
                finished=all(choice.done for choice in choices),
                prompt_token_ids=prompt if first else [],
                prompt_logprobs=self._prompt_logprobs(request, prompt) if first else None,
            )
            if self.hold:
                await asyncio.Event().wait()
            await asyncio.sleep(0)

    def _prompt_logprobs(
        self, request: GenerationRequest, prompt: list[int]
    ) -> list[TokenLogprobs | None] | None:
        top = request.sampling.prompt_logprobs
        if top is None:
            return None
        return [None, *(self.logprobs(token, top) for token in prompt[1:])]

    def logprobs(self, token: int, top: int) -> TokenLogprobs:
        """Predictable log probabilities: the token itself is second, after token 65."""
        text = self.text.decode([token], skip_special_tokens=False)
        best = [(65, -0.25, self.text.decode([65])), (token, -0.5, text), (66, -math.inf, "z")]
        return TokenLogprobs(token, text, -0.5, 2, tuple(best[:top]))


class _ScriptedChoice:
    """One choice, generated token by token."""

    def __init__(self, model: ScriptedModel, request: GenerationRequest, choice: int) -> None:
        self._model = model
        self._sampling = request.sampling
        self._choice = choice
        self._tokens = [*model.text.encode(model.reply(request, choice), add_special_tokens=False), 1]
        self._made: list[int] = []
        self._shown = ""
        self.done = False

    def next(self) -> Completion:
        token = self._tokens[len(self._made)]
        self._made.append(token)
        text = self._model.text.decode(self._made)
        finish: FinishReason | None = None
        stop_reason: str | None = None
        if token == 1:
            finish = self._model.final_reason or FinishReason.STOP
        elif len(self._made) == self._sampling.max_tokens:
            finish = FinishReason.LENGTH
        for stop in self._sampling.stop:
            if stop in text:
                text, finish, stop_reason = text[: text.index(stop)], FinishReason.STOP, stop
        visible = text if finish is not None else text.rstrip("\ufffd")
        fresh, self._shown = visible[len(self._shown) :], visible
        self.done = finish is not None
        top = self._sampling.logprobs
        return Completion(
            self._choice,
            fresh,
            [token],
            logprobs=None if top is None else [self._model.logprobs(token, top)],
            finish_reason=finish,
            stop_reason=stop_reason,
        )


class ScriptedBackend(Backend):
    """Serves the scripted model of the same name."""

    scripts: ClassVar[dict[str, ScriptedModel]] = {}

    async def load(self) -> None:
        pass

    async def unload(self) -> None:
        pass

    def submit(self, request: ResponseStream) -> None:
        raise NotImplementedError

    @property
    def language_model(self) -> ScriptedModel | None:  # type: ignore[override]
        return self.scripts.get(self.context.name)
