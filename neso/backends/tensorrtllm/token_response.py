"""Conversion of generated tokens to response tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.backends.llm.submitted_request import OutputJoiner
from neso.backends.tensorrtllm.token_request import TokenRequest
from neso.generation import Completion, FinishReason, GenerationOutput, Usage
from neso.generation.output import FloatRows
from neso.server.backend import ModelContext
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.tensor import DataType, Tensor

NO_TOKEN = -1
"""Padding of shorter sequences if the request has no `pad_id`."""
NUM_PRECEDING = 8
"""Length of `preceding_ids`: sufficient context to detokenize the next tokens."""


class TensorFormat:
    """Tensor format of a model.

    - batched: tensors have a batch dimension of 1
    - logits: datatypes of logits outputs by name
    """

    def __init__(self, batched: bool, block_size: int, logits: dict[str, DataType]) -> None:
        self.block_size = block_size
        self._batched = batched
        self._logits = logits
        self._length_one = self.tensor("sequence_length", DataType.INT32, np.ones(1, np.int32))

    def lengths(self, lengths: list[int]) -> Tensor:
        """Return the tensor `sequence_length`. The most common value in streams, [1], is cached."""
        if lengths == [1]:
            return self._length_one
        return self.tensor("sequence_length", DataType.INT32, np.array(lengths, np.int32))

    def tensor(self, name: str, datatype: DataType, array: npt.NDArray[Any]) -> Tensor:
        return Tensor(name, datatype, array[np.newaxis] if self._batched else array)

    def scalar(self, name: str, datatype: DataType, value: float) -> Tensor:
        return self.tensor(name, datatype, np.array([value], datatype.dtype))

    def floats(self, name: str, array: FloatRows) -> Tensor:
        """Return a logits tensor, converted to its configured datatype."""
        datatype = self._logits.get(name, DataType.FP32)
        return self.tensor(name, datatype, array.astype(datatype.dtype, copy=False))


@dataclass(slots=True)
class _PendingOutput:
    """Tokens and scores of a sequence since its last response."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    logits: list[FloatRows] = field(default_factory=list)
    cum_log_prob: float = 0.0
    ended: bool = False

    def add(self, delta: Completion, end_id: int) -> None:
        """Add a delta, without the end token."""
        tokens, count = delta.token_ids, len(delta.token_ids)
        if delta.finish_reason is FinishReason.STOP and count and tokens[-1] == end_id:
            count -= 1
            tokens = tokens[:count]
        self.tokens += tokens
        if delta.logprobs:
            self.log_probs += [entry.logprob for entry in delta.logprobs[:count]]
        if delta.cumulative_logprob is not None:
            self.cum_log_prob = delta.cumulative_logprob
        if delta.generation_logits is not None:
            self.logits.append(delta.generation_logits[:count])

    def clear(self) -> None:
        """Reset after a response."""
        self.tokens = []
        if self.log_probs:
            self.log_probs = []
        if self.logits:
            self.logits = []


class RowResponses:
    """Collects the output of one row and creates its responses.

    Each sequence has separate responses: one per step if streaming, otherwise one at the end. All beams share one
    response. Streamed responses contain only the new tokens; other responses contain all tokens, with or without the
    prompt.
    """

    def __init__(
        self, request: TokenRequest, format: TensorFormat, row: int | None, *, send_preceding: bool = False
    ) -> None:
        """`row`: batch index; None for a batch of one. `send_preceding`: add the output `preceding_ids`."""
        sampling = request.generation.sampling
        self._request, self._format, self._row = request, format, row
        self._beams = sampling.uses_beams
        self._streams = request.streaming and not self._beams
        self._prefix = [] if request.exclude_input or self._streams else request.prompt
        self._sequences = [_PendingOutput() for _ in range(sampling.n)]
        keeps_last = send_preceding and not self._prefix
        self._last_tokens = [request.prompt[-NUM_PRECEDING:] for _ in self._sequences] if keeps_last else None
        self._context_logits: FloatRows | None = None
        self._usage = Usage(len(request.prompt))
        self._arrived = time.monotonic_ns()
        self._scheduled = self._first = 0
        self.num_open = request.num_responses
        """Number of unfinished sequences."""

    def add(self, output: GenerationOutput) -> Iterator[list[Tensor]]:
        """Add an engine output and yield the tensors of complete responses."""
        self._usage = output.usage
        if not self._first:
            self._first = time.monotonic_ns()
            self._scheduled = output.scheduled_ns or self._first
        if output.context_logits is not None:
            self._context_logits = output.context_logits
        end_id, sequences = self._request.end_id, self._sequences
        for delta in output.deltas:
            sequence = sequences[delta.index]
            sequence.add(delta, end_id)
            if self._beams:
                continue
            ends = delta.finish_reason is not None
            if ends or (self._streams and sequence.tokens):
                yield self._respond(range(delta.index, delta.index + 1), ends=ends)
        if self._beams and output.finished:
            yield self._respond(range(len(sequences)), ends=True)

    def final_responses(self) -> Iterator[list[Tensor]]:
        """Yield the final responses of a stopped request."""
        if self._beams:
            if self.num_open:
                yield self._respond(range(len(self._sequences)), ends=True)
            return
        for index, sequence in enumerate(self._sequences):
            if not sequence.ended:
                yield self._respond(range(index, index + 1), ends=True)

    def _respond(self, indices: range, *, ends: bool) -> list[Tensor]:
        pending = [self._sequences[index] for index in indices]
        if ends:
            self.num_open -= 1
        tensors = self._tokens(pending)
        if self._last_tokens is not None:
            tensors.append(self._preceding(indices.start, pending[0]))
        if self._request.requested:
            tensors += self._requested_outputs(pending)
        if self._row is not None:
            tensors.append(self._format.scalar("batch_index", DataType.INT32, self._row))
        if self._request.num_responses > 1:
            tensors.append(self._format.scalar("sequence_index", DataType.INT32, indices.start))
        for sequence in pending:
            sequence.clear()
            sequence.ended = ends
        return tensors

    def _tokens(self, pending: list[_PendingOutput]) -> list[Tensor]:
        """Return `output_ids` int32[sequences, tokens] and `sequence_length` int32[sequences]."""
        rows = [self._prefix + sequence.tokens for sequence in pending]
        ids = np.array(rows, np.int32) if len(rows) == 1 else _padded(rows, self._request.pad_id)
        return [
            self._format.tensor("output_ids", DataType.INT32, ids),
            self._format.lengths([len(row) for row in rows]),
        ]

    def _preceding(self, index: int, pending: _PendingOutput) -> Tensor:
        """Return `preceding_ids` int32[<= NUM_PRECEDING]: the preceding tokens; for beams, the end of the prompt."""
        assert self._last_tokens is not None
        preceding = self._last_tokens[index]
        self._last_tokens[index] = (preceding + pending.tokens)[-NUM_PRECEDING:]
        return self._format.tensor("preceding_ids", DataType.INT32, np.array(preceding, np.int32))

    def _requested_outputs(self, pending: list[_PendingOutput]) -> list[Tensor]:
        """Return the outputs requested by inputs `return_<name>`."""
        requested, format = self._request.requested, self._format
        tensors = []
        if "log_probs" in requested:
            sums = np.array([sequence.cum_log_prob for sequence in pending], np.float32)
            tensors.append(format.tensor("cum_log_probs", DataType.FP32, sums))
            each = _padded_floats([np.array(sequence.log_probs, np.float32) for sequence in pending])
            tensors.append(format.tensor("output_log_probs", DataType.FP32, each))
        if self._context_logits is not None:
            tensors.append(format.floats("context_logits", self._context_logits))
            if self.num_open == 0 or self._streams:
                self._context_logits = None
        if "generation_logits" in requested:
            rows = [np.concatenate(sequence.logits) for sequence in pending if sequence.logits]
            if rows:
                tensors.append(format.floats("generation_logits", _padded_floats(rows)))
        if "num_input_tokens" in requested:
            tensors.append(format.scalar("num_input_tokens", DataType.INT32, len(self._request.prompt)))
        if "num_output_tokens" in requested:
            count = sum(len(sequence.tokens) for sequence in pending)
            tensors.append(format.scalar("num_output_tokens", DataType.INT32, count))
        if requested & {"perf_metrics", "kv_cache_reuse_stats"}:
            tensors += self._performance()
        return tensors

    def _performance(self) -> list[Tensor]:
        """Return KV-cache blocks, times in ns of the monotonic clock, and draft token acceptance, as of now."""
        usage, size = self._usage, self._format.block_size
        blocks = -(-(usage.prompt_tokens + usage.completion_tokens) // size)
        reused = usage.cached_tokens // size
        drafted, accepted = usage.draft_tokens, usage.accepted_draft_tokens
        counts: Iterable[tuple[str, DataType, float]] = (
            ("kv_cache_alloc_new_blocks", DataType.INT32, blocks - reused),
            ("kv_cache_reused_blocks", DataType.INT32, reused),
            ("kv_cache_alloc_total_blocks", DataType.INT32, blocks),
            ("arrival_time_ns", DataType.INT64, self._arrived),
            ("first_scheduled_time_ns", DataType.INT64, self._scheduled),
            ("first_token_time_ns", DataType.INT64, self._first),
            ("last_token_time_ns", DataType.INT64, time.monotonic_ns()),
            ("acceptance_rate", DataType.FP32, accepted / drafted if drafted else 0.0),
            ("total_accepted_draft_tokens", DataType.INT32, accepted),
            ("total_draft_tokens", DataType.INT32, drafted),
        )
        return [self._format.scalar(*count) for count in counts]


def _padded(rows: list[list[int]], pad_id: int) -> npt.NDArray[np.int32]:
    """Return int32[rows, longest]; shorter rows are padded with `pad_id`."""
    padded = np.full((len(rows), max(map(len, rows))), pad_id if pad_id >= 0 else NO_TOKEN, np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def _padded_floats(rows: list[FloatRows]) -> FloatRows:
    """Return float32[rows, longest, ...]; shorter rows are padded with zeros."""
    padded = np.zeros((len(rows), max(map(len, rows)), *rows[0].shape[1:]), np.float32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


class ResponseSender:
    """Sends the responses of all rows of a request. The response that ends the last sequence is final."""

    def __init__(
        self,
        context: ModelContext,
        stream: ResponseStream,
        requests: list[TokenRequest],
        format: TensorFormat,
    ) -> None:
        self._model, self._version, self.stream = context.name, context.version, stream
        several = len(requests) > 1
        preceding = "preceding_ids" in stream.request.requested_outputs
        self.rows = [
            RowResponses(request, format, number if several else None, send_preceding=preceding)
            for number, request in enumerate(requests)
        ]
        self._joiners = {row: OutputJoiner(stream) for row in self.rows}
        stream.begin_generation(None if several else requests[0].generation)

    def add(self, row: RowResponses, output: GenerationOutput) -> None:
        """Add an engine output of a row and send the complete responses."""
        self.stream.observe_generation(output)
        joined = self._joiners[row].add(output)
        if joined is not None:
            self._send_output(row, joined)

    def end(self) -> None:
        """Send the final responses of a stopped request."""
        for row, joiner in self._joiners.items():
            if (joined := joiner.flush()) is not None:
                self._send_output(row, joined)
            for tensors in row.final_responses():
                self._send(tensors)

    def _send_output(self, row: RowResponses, output: GenerationOutput) -> None:
        for tensors in row.add(output):
            self._send(tensors)

    def _send(self, tensors: list[Tensor]) -> None:
        final = not any(row.num_open for row in self.rows)
        self.stream.send(InferenceResponse(self._model, self._version, outputs=tensors), final=final)
