"""How the engine runs the models that are named on the command line."""

from __future__ import annotations

from neso.cli.options.kinds import integer
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

ENGINE = Topic(
    "Engine (for models named on the command line)",
    (
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
    ),
)


def engine_options(values: Values) -> dict[str, str]:
    """Parameters of the `llm` backend, by their names there."""
    names = (option.name for option in ENGINE.options)
    return {name.replace("-", "_"): str(values[name]) for name in names if values[name] is not None}
