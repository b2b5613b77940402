"""`neso perf`: benchmark inference servers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neso.cli.flag_command import FlagCommand, command_function, help_text
from neso.cli.perf_flags import ANALYZE_TOPICS, FLAGS, REFUSED, SHORT_OPTIONS, TOPICS, TUNE_TOPICS
from neso.flags import Flag

if TYPE_CHECKING:
    from neso.cli.flag_values import FlagValues
    from neso.perf.endpoints.options import EndpointOptions
    from neso.perf.inputs.options import InputOptions
    from neso.perf.load.options import LoadOptions
    from neso.perf.output_options import OutputOptions

    LoadArguments = tuple[EndpointOptions, LoadOptions, InputOptions, OutputOptions]

SUMMARY = "Benchmark an inference server: send load to it, and report latencies and throughput."
ANALYZE_SUMMARY = "Find the best load of a server under objectives, or compare values of another parameter."
TUNE_SUMMARY = (
    "Serve a model with different engine settings on this machine, and find the best settings for a load."
)
_SEPARATED = {"--model": ",", "--model-names": ",", "--url": ",", "--goodput": None}
"""Options with several values in one argument, and their separator; None is white space."""

Topics = dict[str, tuple[Flag, ...]]


def flags_in(topics: Topics) -> tuple[Flag, ...]:
    """Return the flags of all topics."""
    return tuple(flag for flags in topics.values() for flag in flags)


def normalized(arguments: list[str], flags: Sequence[Flag] = FLAGS) -> list[str]:
    """Return a command line of genai-perf, perf_analyzer or aiperf in the form of ours.

    Short names become long ones, `-m A B` becomes `--model=A --model=B`, and `--` before the options of perf_analyzer
    is left out. Raises `typer.BadParameter` for options without a counterpart.
    """
    repeated = {option for flag in flags if flag.repeated for option in flag.options}
    refused = REFUSED.keys() - {flag.name for flag in flags}
    result: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            continue
        name, separator, value = argument.partition("=")
        name = SHORT_OPTIONS.get(name, name)
        if name.removeprefix("--") in refused:
            raise typer.BadParameter(f"{name} is not supported: {REFUSED[name.removeprefix('--')]}")
        if name not in repeated:
            result.append(name + separator + value)
            continue
        values = [value] if separator else []
        while not separator and rest and not _is_option(rest[0]):
            values.append(rest.pop(0))
        if name in _SEPARATED:
            values = [part for text in values for part in text.split(_SEPARATED[name]) if part]
        result += [f"{name}={value}" for value in values] or [name]
    return result


def _is_option(text: str) -> bool:
    return text.startswith("--") or text in SHORT_OPTIONS


def _report(message: str) -> None:
    print(f"neso perf: {message}", file=sys.stderr)


def _profile(values: FlagValues, options: LoadArguments) -> int:
    from neso.perf.profile import exit_status, profile

    return exit_status(profile(*options, print_message=_report))


def _analyze(values: FlagValues, options: LoadArguments) -> int:
    from neso.perf.analyze import analyze, print_analysis, write_analysis
    from neso.perf.client.generator import ENDS_SWEEP
    from neso.perf.search_options import AnalyzeOptions

    output = options[3]
    analysis = analyze(*options, values.build(AnalyzeOptions))
    print_analysis(analysis)
    print(f"Report: {write_analysis(analysis, output)}")
    reason = analysis.runs[-1].result.stop_reason
    if reason in ENDS_SWEEP:
        return 130 if reason == "interrupted" else 1
    return 0 if analysis.best is not None else 1


def _tune(values: FlagValues, options: LoadArguments) -> int:
    from neso.perf.search_options import TuneOptions
    from neso.perf.tune import tune
    from neso.perf.tune_report import print_result

    output = options[3]
    result = tune(*options, values.build(TuneOptions))
    print_result(result)
    print(f"Report: {output.artifact_dir / 'tune_report.html'}")
    return 130 if result.stopped == "interrupted" else 0


def _compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs or sweeps; the first is the base.")],
    goodput: Annotated[str, typer.Option("--goodput", "-g", help="METRIC:VALUE objectives of goodput.")] = "",
    confidence: Annotated[float, typer.Option(help="Confidence of the intervals.")] = 0.95,
    output: Annotated[Path | None, typer.Option(help="HTML or JSON file to write.")] = None,
) -> None:
    """Compare runs with those of the first folder, with bootstrap confidence intervals."""
    from neso.perf.compare import compare_folders, print_comparison, write_comparison
    from neso.perf.errors import PerfError
    from neso.perf.metrics import parse_slos

    try:
        comparisons, runs = compare_folders(folders, slos=parse_slos([goodput]), confidence=confidence)
        for comparison in comparisons:
            print_comparison(comparison)
        if output is not None:
            write_comparison(comparisons, runs, output)
    except (OSError, PerfError) as error:
        _report(str(error))
        raise typer.Exit(1) from None


def _add_load_command(
    name: str, summary: str, topics: Topics, run: Callable[[FlagValues, LoadArguments], int]
) -> None:
    """Add a command that has the options of a load. `run` gets all values, and the four parts of a load."""
    flags = flags_in(topics)

    class LoadCommand(FlagCommand):
        @staticmethod
        def help_of() -> str:
            return help_text(f"neso perf {name} -m MODEL [OPTIONS]", summary, topics)

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, normalized(args, flags))

    def command(texts: dict[str, list[str]]) -> int:
        from neso.cli.flag_values import FlagValues, OptionError
        from neso.perf.endpoints.options import EndpointOptions
        from neso.perf.errors import PerfError
        from neso.perf.inputs.options import InputOptions
        from neso.perf.load.options import LoadOptions
        from neso.perf.output_options import OutputOptions

        try:
            values = FlagValues.read(flags, texts)
            for warning in values.warnings:
                _report(warning)
            options = (
                values.build(EndpointOptions),
                values.build(LoadOptions),
                values.build(InputOptions),
                values.build(OutputOptions),
            )
            if not options[0].models:
                raise PerfError("--model: give the name of the model")
            return run(values, options)
        except (OptionError, PerfError) as error:
            _report(str(error))
            return 2 if isinstance(error, OptionError) else 1
        except KeyboardInterrupt:
            return 130

    perf.command(name, cls=LoadCommand, help=summary)(command_function(flags, command))


perf = typer.Typer(help=SUMMARY, no_args_is_help=True)
_add_load_command("profile", SUMMARY, TOPICS, _profile)
_add_load_command("analyze", ANALYZE_SUMMARY, ANALYZE_TOPICS, _analyze)
_add_load_command("tune", TUNE_SUMMARY, TUNE_TOPICS, _tune)
perf.command("compare")(_compare)
