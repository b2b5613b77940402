"""The message that ends the start: what is served, where, and a command to try it."""

from __future__ import annotations

from neso.server.core import Core

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
        lines.append(f"  model    {model.name}  (version {model.version}, backend {model.config.backend})")
    for entry in core.repository_index():
        if entry.reason and entry.name not in {model.name for model in models}:
            lines.append(f"  failed   {entry.name}: {entry.reason}")
    lines += [f"  {name:<8} {port:<6} {PROTOCOLS[name]}" for name, port in ports.items()]
    lines += ["", f"Neso is ready after {seconds:.2f} s. Try:", "", *_example(core, ports), ""]
    print("\n".join(lines), flush=True)


def _example(core: Core, ports: dict[str, int]) -> list[str]:
    language_models = [
        model
        for model in core.models()
        if model.language_model is not None and "text_input" in model.signature.inputs
    ]
    if "http" not in ports or not language_models:
        return [f"  curl localhost:{port}/v2" for name, port in ports.items() if name == "http"]
    body = '{"text_input": "What is in-flight batching?", "parameters": {"stream": false, "temperature": 0}}'
    return [
        f"  curl -X POST localhost:{ports['http']}/v2/models/{language_models[0].name}/generate -d '{body}'"
    ]
