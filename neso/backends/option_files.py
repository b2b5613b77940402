"""Option files next to a model, and paths in these files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from neso.generation import SamplingDefaults
from neso.generation.sampling_params import AUTO, DEFAULT_NAMES, NO_DEFAULTS
from neso.server.errors import InvalidArgument


def resolve_relative(path: str | Path, *places: Path) -> Path | None:
    """Return an existing path: absolute, or relative to the first of `places` that contains it; None if not found."""
    return next((found for place in places if (found := place / path).exists()), None)


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if the file does not exist. Raises `InvalidArgument`."""
    if not path.is_file():
        return {}
    try:
        content = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"{path.name}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path.name}: must hold a JSON object")
    return content


logger = logging.getLogger(__name__)


def resolve_generation_config(source: str, *places: Path) -> str:
    """Resolve the option `generation_config`, a path that can be relative to `places`."""
    if source in (AUTO, NO_DEFAULTS):
        return source
    return str(resolve_relative(Path(source).expanduser(), *places) or source)


def resolve_processors(processors: Mapping[str, str], *places: Path) -> dict[str, str]:
    """Resolve the files in the option `logits_processors`, which can be relative to `places`."""
    resolved = {}
    for name, place in processors.items():
        source, _, attribute = place.rpartition(":")
        file = resolve_relative(source, *places) if source.endswith(".py") else None
        resolved[name] = place if file is None else f"{file}:{attribute}"
    return resolved


def log_default_sampling(
    model: str, defaults: SamplingDefaults, source: str, override: Mapping[str, Any]
) -> None:
    """Log the default sampling parameters. `source`, `override`: `generation_config`, `override_generation_config`."""
    names = {name for name in DEFAULT_NAMES if getattr(defaults, name) is not None}
    if not names:
        return
    places = []
    if names - override.keys():
        places.append("the checkpoint's generation_config.json" if source == AUTO else source)
    if names & override.keys():
        places.append("override_generation_config")
    logger.info(
        "model '%s': default sampling parameters for OpenAI: %s, from %s (disable with generation_config 'vllm')",
        *(model, defaults, " and ".join(places)),
    )
