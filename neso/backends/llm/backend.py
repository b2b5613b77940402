"""Backend `llm` (or `neso`): language models on Neso's engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neso.backends.llm.engine_backend import EngineBackend
from neso.backends.llm.engine_options import engine_config
from neso.backends.llm.tensor_request import SCALAR_INPUTS, complete_signature, read_scalars, read_tensors
from neso.backends.llm.tensor_response import ResponseFields, ResponseTensors
from neso.engine.config import EngineConfig
from neso.generation import GenerationOutput
from neso.server.backend import TextFields
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream


class LlmBackend(EngineBackend):
    """Serves text generation with the tensors of `tensor_request.INPUTS`."""

    @classmethod
    def auto_complete(
        cls, config: Any, directory: Path, version_directory: Path, backend_config: Mapping[str, str]
    ) -> None:
        complete_signature(config)

    def engine_config(self) -> EngineConfig:
        return engine_config(self.context.config, self.context.version_directory)

    def submit(self, stream: ResponseStream) -> None:
        if not self.engine.info.generates:
            raise InvalidArgument(
                f"model '{self.context.name}' is an embedding model; use the backend 'embedding'"
            )
        request = read_tensors(stream.request)
        tensors = ResponseTensors(request)
        model, version = self.context.name, self.context.version

        def deliver(output: GenerationOutput) -> None:
            stream.observe_generation(output)
            tensors.add(output)
            if request.stream or output.finished:
                stream.send(InferenceResponse(model, version, outputs=tensors.take()), final=output.finished)

        stream.begin_generation(request.generation)
        self.generate_to(stream, request.generation, deliver)

    @property
    def text_inputs(self) -> Mapping[str, type]:
        return SCALAR_INPUTS if self.engine.info.generates else {}

    def read_text_request(self, request: InferenceRequest, values: Mapping[str, Any]) -> TextFields | None:
        try:
            read = read_scalars(request, values)
        except InvalidArgument:
            return None  # `submit` reports the error
        if read.generation.draft is not None:
            return None  # the request has additional output tensors
        request.payload, request.single_response = read.generation, not read.stream
        return ResponseFields(read)
