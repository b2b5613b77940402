"""A server whose model runs on workers, for the tests that lose workers."""

from __future__ import annotations

from typing import Any

from openai import OpenAI
from server_process import ServerProcess

import neso

MODEL = "neso-pilot"


class ClusterServer:
    """`server` must be ready. `length`: output tokens of each stream."""

    def __init__(self, server: ServerProcess, length: int) -> None:
        assert server.ports, server.output
        self.server, self.length = server, length
        self.client = OpenAI(base_url=server.url("/v1", "openai"), api_key="unused", max_retries=0)

    def count(self, name: str) -> float:
        return self.server.gauge(f"neso_cluster_{name}")

    def stream(self, prompt: str, sampling: dict[str, Any], started: Any = None) -> str:
        """Return the text of a streamed completion; `started` is called after a few pieces."""
        stream = self.client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=self.length,
            stream=True,
            extra_body={"ignore_eos": True},
            **sampling,
        )
        text = ""
        for number, piece in enumerate(stream):
            text += piece.choices[0].text if piece.choices else ""
            if number == 5 and started is not None:
                started()
        return text


def texts_of_one_engine(
    prompts: list[str], length: int, samplings: dict[str, dict[str, Any]]
) -> dict[str, list[str]]:
    """Return the texts of all prompts, by name of the sampling, of an engine in this process."""
    llm = neso.LLM(MODEL, num_blocks=256)
    results = {}
    for name, sampling in samplings.items():
        params = neso.SamplingParams(max_tokens=length, ignore_eos=True, **sampling)
        results[name] = [result.outputs[0].text for result in llm.generate(prompts, params, progress=False)]
    return results
