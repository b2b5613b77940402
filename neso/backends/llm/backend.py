"""The backend of language models on Neso's engine; names `llm` and `neso`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from neso.backends.followed_generation import FollowedGeneration
from neso.backends.llm.engine_backend import EngineBackend, engine_config
from neso.backends.llm.tensor_request import TensorRequest, complete_signature, parse
from neso.backends.llm.tensor_response import ResponseTensors
from neso.engine.config import EngineConfig
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

    def submit(self, request: ResponseStream) -> None:
        if not self.engine.info.generates:
            raise InvalidArgument(
                f"model '{self.context.name}' gives vectors, not text: serve it by the backend 'embedding'"
            )
        self.run_task(request, self._generate(request, parse(request.request)))

    async def _generate(self, stream: ResponseStream, request: TensorRequest) -> None:
        tensors = ResponseTensors(request)
        model, version = self.context.name, self.context.version
        followed = FollowedGeneration(stream, request.generation)
        async with aclosing(self.generate(request.generation)) as outputs:
            async for output in outputs:
                followed.observe(output)
                tensors.add(output)
                if request.stream or output.finished:
                    stream.send(
                        InferenceResponse(model, version, outputs=tensors.take()), final=output.finished
                    )
