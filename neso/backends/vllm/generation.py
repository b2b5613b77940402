"""From Neso's requests for text to vLLM's, and from vLLM's outputs to Neso's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neso.engine.vision.image_processor import open_image
from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InvalidParameter,
    SamplingParams,
    TokenLogprobs,
    Usage,
)

IMAGES = "multi_modal_data"
"""Their key in vLLM's `TextPrompt` and `TokensPrompt`."""

_REASONS = {reason.value: reason for reason in FinishReason}
"""vLLM has names of its own for other ends, such as a repetition that it detects: they are stops."""


def refuse_unknown(request: GenerationRequest) -> None:
    """Raises `InvalidParameter` for what prompts of vLLM cannot hold."""
    for name in ("prompt_embeds", "prompt_embedding_table", "draft"):
        if getattr(request, name) is not None:
            raise InvalidParameter(name, "models on vLLM do not take it")


def prompt_of(token_ids: list[int], images: Sequence[Any], cache_salt: str) -> dict[str, Any]:
    """vLLM's `TokensPrompt`. Reads images, which blocks. Raises `InvalidParameter("images", …)`."""
    prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
    if images:
        prompt[IMAGES] = image_data(images)
    if cache_salt:
        prompt["cache_salt"] = cache_salt
    return prompt


def image_data(images: Sequence[Any]) -> dict[str, list[Any]]:
    """vLLM's `multi_modal_data` of images. Blocks. Raises `InvalidParameter("images", …)`."""
    return {"image": [open_image(image) for image in images]}


class Outputs:
    """Makes the outputs of one request from vLLM's, whose completions are deltas."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._num_tokens = 0
        self._first = True

    def of(self, output: Any) -> GenerationOutput:
        """Neso's output of a `RequestOutput`."""
        deltas = [self._delta(completion) for completion in output.outputs]
        self._num_tokens += sum(len(delta.token_ids) for delta in deltas)
        prompt_ids = output.prompt_token_ids or []
        first, self._first = self._first, False
        metrics = output.metrics
        scheduled = getattr(metrics, "scheduled_ts", 0.0) if first and metrics is not None else 0.0
        return GenerationOutput(
            request_id=output.request_id,
            outputs=deltas,
            usage=Usage(len(prompt_ids), self._num_tokens, output.num_cached_tokens or 0),
            finished=output.finished,
            num_sequences=self._sampling.n,
            prompt_token_ids=list(prompt_ids) if first else [],
            prompt_logprobs=_prompt_logprobs(output, self._sampling.prompt_logprobs) if first else None,
            scheduled_ns=int((scheduled or 0.0) * 1e9),
        )

    def _delta(self, completion: Any) -> Completion:
        token_ids = list(completion.token_ids)
        logprobs = None
        if self._sampling.logprobs is not None and completion.logprobs is not None:
            logprobs = [
                token_logprobs(token, position, self._sampling.logprobs)
                for token, position in zip(token_ids, completion.logprobs, strict=False)
            ]
        reason = completion.finish_reason
        return Completion(
            index=completion.index,
            text=completion.text,
            token_ids=token_ids,
            logprobs=logprobs,
            cumulative_logprob=completion.cumulative_logprob if logprobs is not None else None,
            finish_reason=None if reason is None else _REASONS.get(reason, FinishReason.STOP),
            stop_reason=completion.stop_reason,
        )


def token_logprobs(token: int, position: Mapping[int, Any], most: int) -> TokenLogprobs:
    """Of one position: the token there, and the `most` likely ones (-1: all)."""
    own = position[token]
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    top = tuple(
        (other, entry.logprob, entry.decoded_token or "")
        for other, entry in ranked
        if most < 0 or (entry.rank is not None and entry.rank <= most)
    )
    return TokenLogprobs(token, own.decoded_token or "", own.logprob, own.rank or 0, top)


def _prompt_logprobs(output: Any, most: int | None) -> list[TokenLogprobs | None] | None:
    """One entry a token of the prompt, None for the first."""
    if output.prompt_logprobs is None or most is None:
        return None
    return [
        token_logprobs(token, position, most) if position else None
        for token, position in zip(output.prompt_token_ids, output.prompt_logprobs, strict=False)
    ]
