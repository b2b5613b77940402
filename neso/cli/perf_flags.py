"""Flags of `neso perf profile`, by topic, and those of genai-perf, perf_analyzer and aiperf without a counterpart."""

from __future__ import annotations

from neso.flags import PATH, SWITCH, Flag, flags_of
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.inputs.options import InputOptions
from neso.perf.load.options import LoadOptions
from neso.perf.output_options import OutputOptions
from neso.perf.search_options import AnalyzeOptions, TuneOptions

SHORT_OPTIONS = {
    "-m": "--model",
    "-u": "--url",
    "-H": "--header",
    "-b": "--batch-size-text",
    "-g": "--goodput",
    "-p": "--measurement-interval",
    "-s": "--stability-percentage",
    "-f": "--profile-export-file",
    "-r": "--max-trials",
    "-v": "--verbose",
}
"""Short names of options in genai-perf, perf_analyzer and aiperf."""

_IGNORED = (
    Flag("async", "Asynchronous requests.", SWITCH, ignored="all requests are"),
    Flag("sync", "Synchronous requests.", SWITCH, ignored="requests don't block each other"),
    Flag(
        "use-server-token-count",
        "Count tokens by the server's usage.",
        SWITCH,
        ignored="counts come from the usage when the server reports it",
    ),
    Flag("measurement-mode", "Windows by time or count.", ignored="--measurement-request-count selects it"),
    Flag("url-strategy", "How requests select a URL.", ignored="they go to all URLs in turn"),
    Flag(
        "tokenizer-trust-remote-code",
        "Run code of the tokenizer.",
        SWITCH,
        ignored="no code is downloaded or run",
    ),
    Flag("log-level", "Log level.", ignored="errors are printed, --verbose shows more statistics"),
    Flag("extra-verbose", "Log more.", SWITCH, ignored="see --verbose"),
    Flag("record-processors", "Processes that compute metrics.", ignored="metrics are computed at the end"),
)

REFUSED = {
    "request-rate-series": "use --fixed-schedule with timestamps in the input file",
    "search-space": "use `neso perf tune` or `neso perf analyze`",
    "search-metric": "use `neso perf tune` or `neso perf analyze`",
    "search-recipe": "use `neso perf tune` or `neso perf analyze`",
    "search-sla": "use `neso perf tune` or `neso perf analyze`",
    "sweep-type": "give lists to --concurrency or --request-rate",
    "sweep-range": "give a range START:END:STEP to --concurrency or --request-rate",
    "sweep-list": "give a list to --concurrency or --request-rate",
    "accuracy-benchmark": "neso perf measures speed only",
    "audio-length-mean": "there are no synthetic audios",
    "batch-size-audio": "there are no synthetic audios",
    "video-width": "there are no synthetic videos",
    "otel-url": "the exports are files; convert them",
    "mlflow-tracking-uri": "the exports are files; convert them",
    "wandb-project": "the exports are files; convert them",
    "ssl-grpc-use-ssl": "use a URL with grpcs://",
    "request-intervals": "use --fixed-schedule with timestamps in the input file",
    "periodic-concurrency-range": "use --concurrency-ramp-duration",
    "binary-search": "use `neso perf analyze`",
}
"""Options without a counterpart, and what to use instead."""


def _topics() -> dict[str, tuple[Flag, ...]]:
    flags = (
        *flags_of(EndpointOptions, "Endpoint"),
        *flags_of(LoadOptions, "Load"),
        *flags_of(InputOptions, "Inputs"),
        *flags_of(OutputOptions, "Output"),
        Flag(
            "config",
            "YAML file with names of options as keys. The command line takes precedence.",
            PATH,
            topic="Output",
        ),
    )
    topics = {
        topic: tuple(one for one in flags if one.topic == topic)
        for topic in dict.fromkeys(f.topic for f in flags)
    }
    return topics | {"Without effect, for command lines of other tools": _IGNORED}


TOPICS = _topics()
FLAGS = tuple(flag for flags in TOPICS.values() for flag in flags)
ANALYZE_TOPICS = {"Analysis": tuple(flags_of(AnalyzeOptions)), **TOPICS}
TUNE_TOPICS = {"Tuning": tuple(flags_of(TuneOptions)), **TOPICS}
