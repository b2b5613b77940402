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

_EXPORTS = "the exports are files; convert them"
_AUDIO = "there are no synthetic audios"
_VIDEO = "there are no synthetic videos"
_SEARCH = "use `neso perf tune` or `neso perf analyze`"
_SCHEDULE = "use --fixed-schedule with timestamps in the input file"
_RANGE = "give a range START:END:STEP to --concurrency"
_LENGTHS = "use `neso perf analyze --sweep-type {}_sequence_length`"

REFUSED = {
    "request-rate-series": _SCHEDULE,
    "request-intervals": _SCHEDULE,
    "prefill-concurrency-ramp-duration": "the limit of the prefill phase has no ramp; use --concurrency-ramp-duration",
    "warmup-prefill-concurrency": "the warm-up has the --prefill-concurrency of the run",
    "num-warmup-sessions": "use --warmup-request-count",
    "periodic-concurrency-range": "use --concurrency-ramp-duration",
    "search-space": _SEARCH,
    "search-metric": _SEARCH,
    "search-recipe": _SEARCH,
    "search-sla": _SEARCH,
    "binary-search": "use `neso perf analyze`",
    "latency-threshold": "use `neso perf analyze` with --goodput",
    "percentile": "the exports have all percentiles; --stability-percentage uses means",
    "checkpoint-dir": "`neso perf analyze` continues an interrupted analysis of its --artifact-dir",
    "enable-checkpointing": "`neso perf analyze` continues an interrupted analysis of its --artifact-dir",
    "sweep-type": "give lists to --concurrency or --request-rate",
    "sweep-range": "give a range START:END:STEP to --concurrency or --request-rate",
    "sweep-list": "give a list to --concurrency or --request-rate",
    "concurrency-min": _RANGE,
    "concurrency-max": _RANGE,
    "concurrency-steps": _RANGE,
    "isl-min": _LENGTHS.format("input"),
    "isl-max": _LENGTHS.format("input"),
    "isl-steps": _LENGTHS.format("input"),
    "osl-min": _LENGTHS.format("output"),
    "osl-max": _LENGTHS.format("output"),
    "osl-steps": _LENGTHS.format("output"),
    "ttft-sla-ms": "use --goodput time_to_first_token:VALUE",
    "itl-sla-ms": "use --goodput inter_token_latency:VALUE",
    "tpot-sla-ms": "use --goodput time_per_output_token:VALUE",
    "e2e-sla-ms": "use --goodput request_latency:VALUE",
    "confidence-level": "use `neso perf compare --confidence`",
    "accuracy-benchmark": "neso perf measures speed only",
    "audio-length-mean": _AUDIO,
    "audio-length-stddev": _AUDIO,
    "audio-format": _AUDIO,
    "audio-sample-rates": _AUDIO,
    "audio-depths": _AUDIO,
    "audio-num-channels": _AUDIO,
    "batch-size-audio": _AUDIO,
    "audio-batch-size": _AUDIO,
    "video-width": _VIDEO,
    "video-height": _VIDEO,
    "video-duration": _VIDEO,
    "video-fps": _VIDEO,
    "batch-size-video": _VIDEO,
    "video-batch-size": _VIDEO,
    "otel-url": _EXPORTS,
    "mlflow-tracking-uri": _EXPORTS,
    "wandb-project": _EXPORTS,
    "ssl-grpc-use-ssl": "use a URL with grpcs://",
    "ssl-https-verify-peer": "use --ssl-insecure to verify no certificate",
    "ssl-https-verify-host": "use --ssl-insecure to verify no certificate",
    "request-parameter": "use --extra-inputs NAME:VALUE",
    "num-of-sequences": "use --concurrency",
    "sequence-length-variation": "all sequences have --sequence-length requests",
    "sequence-id-range": "sequence ids count from 1",
    "start-sequence-id": "sequence ids count from 1",
    "input-tensor-format": "tensors are binary",
    "output-tensor-format": "tensors are binary",
    "grpc-compression-algorithm": "messages are not compressed",
    "model-repository": "start the server with it; for an engine in this process, use --endpoint-type engine",
    "trace-level": "use the trace options of the server",
    "trace-rate": "use the trace options of the server",
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
