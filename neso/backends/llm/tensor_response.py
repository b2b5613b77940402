"""Responses of a text-generation model as tensors or JSON values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from neso.backends.llm.tensor_request import TensorRequest
from neso.generation import Completion, GenerationOutput, TokenLogprobs, Usage
from neso.generation.output import FloatRows
from neso.server.tensor import DataType, Tensor


@dataclass(slots=True)
class _Sequence:
    text: str = ""
    num_tokens: int = 0
    finish_reason: str = ""
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    logits: list[FloatRows] = field(default_factory=list)

    def extend(self, delta: Completion) -> None:
        self.text += delta.text
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.generation_logits is not None:
            self.logits.append(delta.generation_logits)


class ResponseTensors:
    """Collects the outputs of one request. `take` returns the part added since the last call.

    For a stream, `take` is called after every output, otherwise once at the end. The tensors have one element per
    sequence; a sequence without new tokens has an empty text.
    """

    def __init__(self, request: TensorRequest) -> None:
        self._request = request
        self._usage = Usage(0)
        self._context_logits: FloatRows | None = None
        self._sequences = [_Sequence() for _ in range(request.generation.sampling.n)]
        if not request.exclude_input:
            for sequence in self._sequences:
                sequence.text = request.prompt

    def add(self, output: GenerationOutput) -> None:
        """Add an output."""
        self._usage = output.usage
        if output.context_logits is not None:
            self._context_logits = output.context_logits
        for delta in output.deltas:
            self._sequences[delta.index].extend(delta)

    def take(self) -> list[Tensor]:
        """Return `text_output` and the requested outputs."""
        sequences = self._sequences
        self._sequences = [_Sequence(cumulative_logprob=s.cumulative_logprob) for s in sequences]
        requested = self._request.requested
        tensors = [Tensor.from_strings("text_output", [s.text for s in sequences])]
        if "finish_reason" in requested:
            tensors.append(Tensor.from_strings("finish_reason", [s.finish_reason for s in sequences]))
        if "cumulative_logprob" in requested:
            values = np.array([s.cumulative_logprob for s in sequences], np.float32)
            tensors.append(Tensor("cumulative_logprob", DataType.FP32, values))
        if "logprobs" in requested:
            tensors.append(Tensor.from_strings("logprobs", [_as_json(s.logprobs) for s in sequences]))
        if "num_input_tokens" in requested:
            count = np.array([self._usage.prompt_tokens], np.uint32)
            tensors.append(Tensor("num_input_tokens", DataType.UINT32, count))
        if "num_output_tokens" in requested:
            counts = np.array([s.num_tokens for s in sequences], np.uint32)
            tensors.append(Tensor("num_output_tokens", DataType.UINT32, counts))
        if self._request.generation.draft is not None:
            tensors += _draft_tensors(self._usage)
        return tensors + self._logits(sequences)

    def _logits(self, sequences: list[_Sequence]) -> list[Tensor]:
        """Return the requested logits. The first response contains the logits of the prompt."""
        tensors = []
        if self._context_logits is not None:
            tensors.append(Tensor("context_logits", DataType.FP32, self._context_logits))
            self._context_logits = None
        if self._request.generation.sampling.return_generation_logits:
            rows = [np.concatenate(s.logits) if s.logits else None for s in sequences]
            tensors.append(Tensor("generation_logits", DataType.FP32, _padded(rows)))
        return tensors


class ResponseFields:
    """Converts outputs of a request to the JSON fields of a generate response, for `SCALAR_INPUTS`.

    A field is a list with one element per sequence, or the element itself for one sequence.
    """

    def __init__(self, request: TensorRequest) -> None:
        self._requested = request.requested
        self._num_sequences = request.generation.sampling.n
        self._prefix = "" if request.exclude_input else request.prompt

    def __call__(self, output: GenerationOutput) -> dict[str, Any]:
        prefix, self._prefix = self._prefix, ""
        sequences = [_Sequence(prefix) for _ in range(self._num_sequences)]
        for delta in output.outputs:
            sequences[delta.index].extend(delta)
        fields: dict[str, list[Any]] = {"text_output": [s.text for s in sequences]}
        if "finish_reason" in self._requested:
            fields["finish_reason"] = [s.finish_reason for s in sequences]
        if "logprobs" in self._requested:
            fields["logprobs"] = [_as_json(s.logprobs) for s in sequences]
        if "num_input_tokens" in self._requested:
            fields["num_input_tokens"] = [output.usage.prompt_tokens]
        if "num_output_tokens" in self._requested:
            fields["num_output_tokens"] = [s.num_tokens for s in sequences]
        return {name: values[0] if len(values) == 1 else values for name, values in fields.items()}


def _draft_tensors(usage: Usage) -> list[Tensor]:
    """Return the numbers of drafted and accepted tokens of a request."""
    drafted, accepted = usage.draft_tokens, usage.accepted_draft_tokens
    rate = accepted / drafted if drafted else 0.0
    return [
        Tensor("total_draft_tokens", DataType.INT32, np.array([drafted], np.int32)),
        Tensor("total_accepted_draft_tokens", DataType.INT32, np.array([accepted], np.int32)),
        Tensor("acceptance_rate", DataType.FP32, np.array([rate], np.float32)),
    ]


def _padded(sequences: list[FloatRows | None]) -> FloatRows:
    """Return float32[sequence, token, vocab_size]; shorter sequences are padded with zeros."""
    shapes = [rows.shape for rows in sequences if rows is not None]
    length, vocabulary = max(shapes, default=(0, 0))
    padded = np.zeros((len(sequences), length, vocabulary), np.float32)
    for target, rows in zip(padded, sequences, strict=True):
        if rows is not None:
            target[: len(rows)] = rows
    return padded


def _as_json(logprobs: list[TokenLogprobs]) -> str:
    """Return one object per position: token id → log probability, rank and text. The sampled token is first."""
    positions = []
    for entry in logprobs:
        sampled = {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.token}
        position = {str(entry.token_id): sampled}  # first, as in vLLM
        for rank, (token, logprob, text) in enumerate(entry.top, start=1):
            position.setdefault(str(token), {"logprob": logprob, "rank": rank, "decoded_token": text})
        positions.append(position)
    return orjson.dumps(positions).decode()
