"""Options of `neso perf analyze` and `neso perf tune`, with their flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from neso.flags import SWITCH, Flag, choice, integer, number

SWEEPS = (
    "concurrency",
    "request_rate",
    "input_sequence_length",
    "output_sequence_length",
    "batch_size",
    "passages",
    "num_dataset_entries",
)


@dataclass(frozen=True)
class GoalOptions:
    """Objective of a search, and reuse of earlier runs."""

    objective: Annotated[
        str,
        Flag(
            "objective",
            "Metric to improve, with a statistic: output_token_throughput, or time_to_first_token:p99.",
            default_text="goodput with --goodput, else output_token_throughput or request_throughput",
        ),
    ] = ""
    min_good_share: Annotated[
        float,
        Flag("min-good-share", "Percentage of requests that must meet --goodput.", number(0)),
    ] = 95.0
    fresh: Annotated[
        bool,
        Flag(
            "fresh",
            "Measure again instead of using the runs of an earlier search in the artifact folder.",
            SWITCH,
        ),
    ] = False


@dataclass(frozen=True)
class AnalyzeOptions(GoalOptions):
    """Parameter and values of `neso perf analyze`."""

    sweep_type: Annotated[str, Flag("sweep-type", "Parameter to vary.", choice(*SWEEPS))] = "concurrency"
    sweep_list: Annotated[str, Flag("sweep-list", "Values, separated by commas.", metavar="N,N,…")] = ""
    sweep_range: Annotated[
        str,
        Flag(
            "sweep-range",
            "Range of values; without STEP, each value is twice the one before it.",
            metavar="MIN:MAX[:STEP]",
            default_text="a search that doubles the load until objectives fail or throughput saturates, then bisects",
        ),
    ] = ""
    max_load: Annotated[int, Flag("max-load", "Maximum load of the search.", integer(1))] = 1024


@dataclass(frozen=True)
class TuneOptions(GoalOptions):
    """Search space and limits of `neso perf tune`."""

    space: Annotated[
        tuple[str, ...],
        Flag(
            "space",
            "NAME=V1,V2,…: values of an engine option to try, instead of the default search space.",
            metavar="NAME=VALUES",
        ),
    ] = ()
    allow_quantization: Annotated[
        bool, Flag("allow-quantization", "Also try int8 and int4 weights, which change answers.", SWITCH)
    ] = False
    max_configurations: Annotated[
        int, Flag("max-configurations", "Maximum number of configurations to try.", integer(1))
    ] = 24
    max_minutes: Annotated[
        float | None, Flag("max-minutes", "Time after which no trial starts, in minutes.", number(0.1))
    ] = None
    confirmations: Annotated[
        int,
        Flag(
            "confirmations", "Pairs of runs that compare the best configuration with the default.", integer(1)
        ),
    ] = 2
    serve_arguments: Annotated[
        tuple[str, ...],
        Flag("serve-argument", "Argument to add to each `neso serve` command.", metavar="ARGUMENT"),
    ] = ()
