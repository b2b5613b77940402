"""Defaults of sampling that a language model comes with: where they are, and that people are told of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neso.backends.near_path import near_path
from neso.generation import SamplingDefaults
from neso.generation.sampling_params import AUTO, DEFAULT_NAMES, NO_DEFAULTS

logger = logging.getLogger(__name__)


def near_generation_config(source: str, *places: Path) -> str:
    """The option `generation_config`: a path may be relative to `places`."""
    if source in (AUTO, NO_DEFAULTS):
        return source
    return str(near_path(Path(source).expanduser(), *places) or source)


def log_default_sampling(
    model: str, defaults: SamplingDefaults, source: str, override: Mapping[str, Any]
) -> None:
    """Say which there are; `source` and `override`: the options `generation_config`, `override_generation_config`."""
    names = {name for name in DEFAULT_NAMES if getattr(defaults, name) is not None}
    if not names:
        return
    places = []
    if names - override.keys():
        places.append("the checkpoint's generation_config.json" if source == AUTO else source)
    if names & override.keys():
        places.append("override_generation_config")
    logger.info(
        "model '%s': defaults of sampling for OpenAI's API: %s, by %s (generation_config 'vllm': by no file)",
        *(model, defaults, " and ".join(places)),
    )
