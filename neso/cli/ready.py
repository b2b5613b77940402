"""The message that ends the start: what is served, where, and a command to try it."""

from __future__ import annotations

from neso.server.core import Core
from neso.server.model import Model

PROTOCOLS = {
    "http": "KServe v2 HTTP, generate; OpenAI under /v1",
    "grpc": "KServe v2 gRPC",
    "metrics": "Prometheus /metrics",
    "openai": "OpenAI API /v1, docs at /docs",
}


def show_ready(core: Core, ports: dict[str, int], seconds: float) -> None:
    """Print it to standard output."""
    lines = [""]
    models = core.models()
    for model in models:
        lines.append(f"  model    {model.name}  (version {model.version}, {_runs_on(model)})")
    for entry in core.repository_index():
        if entry.reason and entry.name not in {model.name for model in models}:
            lines.append(f"  failed   {entry.name}: {entry.reason}")
    lines += [f"  {name:<8} {port:<6} {PROTOCOLS[name]}" for name, port in ports.items()]
    lines += ["", f"Neso is ready after {seconds:.2f} s. Try:", "", *_example(core, ports), ""]
    print("\n".join(lines), flush=True)


def _runs_on(model: Model) -> str:
    """Ensembles, and models that leave their backend to their platform, have the latter only."""
    config = model.config
    return f"backend {config.backend}" if config.backend else f"platform {config.platform}"


def _example(core: Core, ports: dict[str, int]) -> list[str]:
    if "http" not in ports:
        return []
    address = f"localhost:{ports['http']}/v2"
    model = next(filter(_completes_text, core.models()), None)
    if model is None:
        return [f"  curl {address}"]
    how = '"max_tokens": 32' if "max_tokens" in model.signature.inputs else '"parameters": {"temperature": 0}'
    body = f'{{"text_input": "What is in-flight batching?", {how}}}'
    return [f"  curl -X POST {address}/models/{model.name}/generate -d '{body}'"]


def _completes_text(model: Model) -> bool:
    """Whether a text, and perhaps a number of tokens, is all that it needs to go on with it."""
    needed = {name for name, spec in model.signature.inputs.items() if not spec.optional}
    return "text_input" in needed <= {"text_input", "max_tokens"} and "text_output" in model.signature.outputs
