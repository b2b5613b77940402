"""The front ends that tritonserver has for clouds."""

from __future__ import annotations

from neso.cli.options.kinds import BOOLEAN, PORT, integer
from neso.cli.options.option import Option, Topic

_SAGEMAKER = "SageMaker's endpoints are not served"
_VERTEX = "Vertex AI's endpoints are not served"

CLOUD = Topic(
    "Clouds",
    (
        Option("allow-sagemaker", "SageMaker's endpoints.", BOOLEAN, False, ignored=_SAGEMAKER),
        Option("sagemaker-port", "Port of SageMaker's endpoints.", PORT, ignored=_SAGEMAKER),
        Option(
            "sagemaker-safe-port-range",
            "Ports that other endpoints may have beside SageMaker's.",
            metavar="FROM-TO",
            ignored=_SAGEMAKER,
        ),
        Option("sagemaker-thread-count", "Threads of SageMaker's endpoints.", integer(1), ignored=_SAGEMAKER),
        Option("allow-vertex-ai", "Vertex AI's endpoints.", BOOLEAN, False, ignored=_VERTEX),
        Option("vertex-ai-port", "Port of Vertex AI's endpoints.", PORT, ignored=_VERTEX),
        Option("vertex-ai-thread-count", "Threads of Vertex AI's endpoints.", integer(1), ignored=_VERTEX),
        Option("vertex-ai-default-model", "Model of Vertex AI's endpoints.", ignored=_VERTEX),
    ),
)
