"""How the engine runs the models that are named on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from neso.cli.options.errors import OptionError
from neso.cli.options.kinds import FLAG, JSON_OBJECT, integer
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

_BY_NAME = (
    Option("runner", "What executes the model; auto takes the fastest here.", default="auto"),
    Option(
        "dtype",
        "Of weights and activations: float32, float16, bfloat16.",
        default_text="the model's",
    ),
    Option(
        "quantization",
        "Quantize dense weights while loading: int8, int4, int8_dynamic.",
        default_text="none",
    ),
    Option("num-threads", "Threads of each engine on a CPU.", integer(1), default_text="all cores"),
    Option(
        "max-model-len",
        "Longest prompt and output together, in tokens.",
        integer(1),
        default_text="the model's",
    ),
    Option("max-num-seqs", "Most sequences in one step.", integer(1), default_text="64"),
    Option("max-num-batched-tokens", "Token budget of one step.", integer(1), default_text="1024"),
    Option(
        "kv-cache-memory",
        "Size of the key-value cache, in bytes.",
        integer(1),
        default_text="a quarter of the free memory at most",
    ),
    Option(
        "generation-config",
        "Defaults of sampling for OpenAI's API: auto takes them from the model's generation_config.json, vllm from "
        "nowhere; or a directory with such a file.",
        metavar="auto|vllm|PATH",
        default_text="auto",
    ),
    Option(
        "override-generation-config",
        'Defaults of sampling that go before those of the file: {"temperature": 0.5}.',
        JSON_OBJECT,
    ),
    Option("enable-lora", "Requests may name LoRA adapters; --lora-modules switches it on too.", FLAG),
    Option("max-loras", "LoRA adapters in one batch.", integer(1), default_text="8"),
    Option("max-lora-rank", "Largest rank of an adapter.", integer(1), default_text="64"),
)
"""The engine has them by the same names, with underscores."""

_SPECULATION_NAMES = {"method": "speculative", "model": "speculative_model"}

ENGINE = Topic(
    "Engine (for models named on the command line)",
    (
        *_BY_NAME,
        Option("lora-modules", "LoRA adapter to load at the start.", repeated=True, metavar="NAME=PATH"),
        Option(
            "speculative-config",
            'Guess tokens: {"method": "ngram", "num_speculative_tokens": 4}; model is the draft model.',
            JSON_OBJECT,
        ),
        Option(
            "engine-config",
            "Any option of the engine, by its name in model.json.",
            repeated=True,
            metavar="KEY=VALUE",
        ),
    ),
)


def engine_options(values: Values) -> dict[str, str]:
    """Parameters of the `llm` backend, by their names there. Raises `OptionError`."""
    options: dict[str, str] = {}
    for flag, name, value in _engine_options(values):
        if name in options:
            raise OptionError(f"{flag}: '{name}' is given twice")
        options[name] = value
    return options


def _engine_options(values: Values) -> Iterator[tuple[str, str, str]]:
    """The option of the command line, the parameter, its value."""
    for option in _BY_NAME:
        if values.given(option.name):
            yield option.flag, option.name.replace("-", "_"), _written(values[option.name])
    if values["lora-modules"]:
        yield "--lora-modules", "lora_modules", json.dumps(_adapters(values["lora-modules"]))
    for key, value in (values["speculative-config"] or {}).items():
        yield "--speculative-config", _SPECULATION_NAMES.get(key, key), _written(value)
    for text in values["engine-config"]:
        yield ("--engine-config", *_pair("--engine-config", "KEY=VALUE", text))


def _adapters(texts: list[str]) -> dict[str, str]:
    """Directories by names."""
    adapters: dict[str, str] = {}
    for text in texts:
        name, path = _pair("--lora-modules", "NAME=PATH", text)
        if name in adapters:
            raise OptionError(f"--lora-modules: '{name}' is given twice")
        adapters[name] = path
    return adapters


def _pair(flag: str, form: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise OptionError(f"{flag}: expected {form}, got '{text}'")
    return name, value


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
