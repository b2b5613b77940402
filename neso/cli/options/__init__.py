"""The options of `neso serve`, by topic: tritonserver's, by its names, and our own.

Nothing here imports the server: `--help` is to be quick.
"""

from neso.cli.options.access import ACCESS
from neso.cli.options.cache import CACHE
from neso.cli.options.cloud import CLOUD
from neso.cli.options.engine import ENGINE
from neso.cli.options.grpc import GRPC
from neso.cli.options.http import HTTP
from neso.cli.options.logging import LOGGING
from neso.cli.options.memory import MEMORY
from neso.cli.options.metrics import METRICS
from neso.cli.options.openai import OPENAI
from neso.cli.options.option import Option
from neso.cli.options.process import PROCESS
from neso.cli.options.rate_limiter import RATE_LIMITER
from neso.cli.options.repository import REPOSITORY
from neso.cli.options.tracing import TRACING

TOPICS = (
    REPOSITORY,
    ENGINE,
    HTTP,
    GRPC,
    OPENAI,
    ACCESS,
    METRICS,
    PROCESS,
    LOGGING,
    TRACING,
    CACHE,
    RATE_LIMITER,
    MEMORY,
    CLOUD,
)
OPTIONS: tuple[Option, ...] = tuple(option for topic in TOPICS for option in topic.options)

__all__ = ["OPTIONS", "TOPICS"]
