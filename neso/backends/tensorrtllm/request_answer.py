"""The responses to one request, of all its rows."""

from __future__ import annotations

from neso.backends.followed_generation import FollowedGeneration
from neso.backends.tensorrtllm.answer import AnswerFormat, RowAnswer
from neso.backends.tensorrtllm.token_request import TokenRequest
from neso.generation import GenerationOutput
from neso.server.backend import ModelContext
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.tensor import Tensor


class RequestAnswer:
    """Sends what its `rows` have to say; the response with which the last sequence ends is the final one."""

    def __init__(
        self,
        context: ModelContext,
        stream: ResponseStream,
        requests: list[TokenRequest],
        format: AnswerFormat,
    ) -> None:
        self._model, self._version, self._stream = context.name, context.version, stream
        several = len(requests) > 1
        preceding = "preceding_ids" in stream.request.requested_outputs
        self.rows = [
            RowAnswer(request, format, number if several else None, tells_preceding=preceding)
            for number, request in enumerate(requests)
        ]
        self._followed = FollowedGeneration(stream, None if several else requests[0].generation)

    def take(self, row: RowAnswer, output: GenerationOutput) -> None:
        """A row has gained tokens."""
        self._followed.observe(output)
        for tensors in row.take(output):
            self._send(tensors)

    def end(self) -> None:
        """The request was stopped: answer with what there is."""
        for row in self.rows:
            for tensors in row.rest():
                self._send(tensors)

    def _send(self, tensors: list[Tensor]) -> None:
        final = not any(row.num_open for row in self.rows)
        self._stream.send(InferenceResponse(self._model, self._version, outputs=tensors), final=final)
