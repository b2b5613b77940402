"""The backend of language models on Neso's engine; names `llm` and `neso`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neso.backends.llm.engine_backend import EngineBackend, engine_config
from neso.backends.llm.tensor_request import complete_signature, parse
from neso.backends.llm.tensor_response import ResponseTensors
from neso.engine.config import EngineConfig
from neso.generation import GenerationOutput
from neso.server.errors import InvalidArgument
from neso.server.inference_response import InferenceResponse, ResponseStream


class LlmBackend(EngineBackend):
    """Texts in, texts out; see `signature`."""

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
                f"model '{self.context.name}' gives vectors, not text: serve it by the backend 'embedding'"
            )
        request = parse(stream.request)
        tensors = ResponseTensors(request)
        model, version = self.context.name, self.context.version

        def deliver(output: GenerationOutput) -> None:
            stream.observe_generation(output)
            tensors.add(output)
            if request.stream or output.finished:
                stream.send(InferenceResponse(model, version, outputs=tensors.take()), final=output.finished)

        stream.begin_generation(request.generation)
        self.generate_to(stream, request.generation, deliver)
