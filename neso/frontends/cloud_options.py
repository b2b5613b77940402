"""Options of the endpoints for Amazon SageMaker and Google Vertex AI.

Both clouds set environment variables in the container, which are read here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from neso.flags import PORT, Flag
from neso.frontends.frontend_options import HttpOptions
from neso.server.errors import InvalidArgument

INFERENCE_TYPES = ("infer", "generate", "generate_stream", "chat_completions", "completions", "embeddings")
"""What `/invocations` can serve: KServe's operations, as in Triton, and those of the OpenAI API."""
_PING_MODES = ("ready", "live")


def _port_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last) <= 65535):
        raise InvalidArgument(f"expected FROM-TO, two ports in ascending order, got '{text}'")
    return int(first), int(last)


def _one_of(environment: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    value = environment.get(name) or values[0]
    if value not in values:
        raise InvalidArgument(f"{name}: expected one of {', '.join(values)}, got '{value}'")
    return value


@dataclass(frozen=True, slots=True)
class SageMakerOptions:
    """Options of the SageMaker endpoints.

    - http: limits, and the headers required by restricted APIs
    - default_model: model of `/invocations`; "": the only one that is loaded
    - models_directory: models that are loaded by request are below it
    """

    port: Annotated[int, Flag("sagemaker-port", "Port of the SageMaker endpoints.", PORT)] = 8080
    safe_ports: Annotated[
        tuple[int, int] | None,
        Flag(
            "sagemaker-safe-port-range",
            "Range of the ports that other endpoints may use.",
            metavar="FROM-TO",
            convert=lambda text: _port_range(text) if text else None,
        ),
    ] = None
    http: HttpOptions = field(default_factory=HttpOptions)
    ping_mode: str = "ready"
    default_model: str = ""
    inference_type: str = "infer"
    models_directory: Path = Path("/opt/ml/models")

    def with_environment(self, environment: Mapping[str, str] = os.environ) -> SageMakerOptions:
        """Return the options with the values of SAGEMAKER_TRITON_* variables. Raises `InvalidArgument`."""
        return replace(
            self,
            ping_mode=_one_of(environment, "SAGEMAKER_TRITON_PING_MODE", _PING_MODES),
            default_model=environment.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", ""),
            inference_type=_one_of(environment, "SAGEMAKER_TRITON_INFERENCE_TYPE", INFERENCE_TYPES),
        )

    def check_port(self, frontend: str, port: int) -> None:
        """Raise `InvalidArgument` if the port of another frontend is outside `safe_ports`."""
        if self.safe_ports is not None and not self.safe_ports[0] <= port <= self.safe_ports[1]:
            allowed = "{}-{}".format(*self.safe_ports)
            raise InvalidArgument(
                f"--sagemaker-safe-port-range: the {frontend} port {port} is not in {allowed}"
            )


@dataclass(frozen=True, slots=True)
class VertexAiOptions:
    """Options of the Vertex AI endpoints.

    - port: None: AIP_HTTP_PORT, or 8080
    - default_model: model of requests without a redirect; "": the only one that is loaded
    - predict_route, health_route: paths that Vertex AI requests
    - http: limits, and the headers required by restricted APIs
    """

    port: Annotated[
        int | None,
        Flag(
            "vertex-ai-port",
            "Port of the Vertex AI endpoints.",
            PORT,
            default_text="AIP_HTTP_PORT of the environment, or 8080",
        ),
    ] = None
    default_model: Annotated[
        str,
        Flag(
            "vertex-ai-default-model",
            "Model of requests that are not redirected.",
            default_text="the only model that is loaded",
        ),
    ] = ""
    http: HttpOptions = field(default_factory=HttpOptions)
    predict_route: str = "/predict"
    health_route: str = "/health"

    def with_environment(self, environment: Mapping[str, str] = os.environ) -> VertexAiOptions:
        """Return the options with the values of AIP_* variables. Raises `InvalidArgument` if one cannot be used."""
        routes = {}
        for name in ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"):
            routes[name] = environment.get(name, "")
            if not routes[name].startswith("/") or "{" in routes[name]:
                raise InvalidArgument(f"{name}: expected a path such as /predict, got '{routes[name]}'")
        port = environment.get("AIP_HTTP_PORT") or "8080"
        if not (port.isdigit() and int(port) <= 65535):
            raise InvalidArgument(f"AIP_HTTP_PORT: expected a port, got '{port}'")
        return replace(
            self,
            port=int(port) if self.port is None else self.port,
            predict_route=routes["AIP_PREDICT_ROUTE"],
            health_route=routes["AIP_HEALTH_ROUTE"],
        )


def in_vertex_ai(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the process runs in a prediction container of Vertex AI."""
    return environment.get("AIP_MODE") == "PREDICTION"
