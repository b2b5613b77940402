"""Layouts of one model, which takes and gives text itself."""

from __future__ import annotations

import json


def neso_files(name: str, model: str) -> dict[str, str]:
    """A model on Neso's engine. Its inputs and outputs are filled in when it is loaded."""
    return _files(name, "neso", {"model": model})


def vllm_files(name: str, model: str) -> dict[str, str]:
    """A model of Triton's vLLM backend; model.json holds vLLM's engine arguments."""
    return _files(name, "vllm", {"model": model})


def _files(name: str, backend: str, arguments: dict[str, str]) -> dict[str, str]:
    config = f'backend: "{backend}"\n\n# The engine decides where the model runs.\n'
    config += "instance_group [ { count: 1 kind: KIND_MODEL } ]\n"
    return {
        f"{name}/config.pbtxt": config,
        f"{name}/1/model.json": json.dumps(arguments, indent=2, ensure_ascii=False) + "\n",
    }
