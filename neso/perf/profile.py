"""`neso perf profile`: run a sweep and write its exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from neso.perf.client.generator import ENDS_SWEEP, LoadGenerator, as_json, default_workers, load_name
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.endpoints.registry import TARGETS, endpoint_class
from neso.perf.errors import PerfError
from neso.perf.inputs import WithTokenIds, open_source, with_extra_inputs
from neso.perf.inputs.options import InputOptions
from neso.perf.inputs.synthetic import tokenizer_for
from neso.perf.load.options import LoadOptions
from neso.perf.load.plan import LoadPlan
from neso.perf.metrics import parse_slos
from neso.perf.output_options import OutputOptions
from neso.perf.records import RunResult
from neso.perf.requests import InputSource, PerfRequest

if TYPE_CHECKING:
    from neso.perf.endpoints.kserve import Convention


def profile(
    endpoint: EndpointOptions,
    load: LoadOptions,
    inputs: InputOptions,
    output: OutputOptions,
    *,
    print_message: Callable[[str], None] = print,
) -> list[RunResult]:
    """Run each load of the sweep, write its exports when it ends, and the summary at the end.

    Returns the runs that were made; Ctrl-C and a server that is gone end the sweep. Raises `PerfError`.
    """
    from neso.perf import exports
    from neso.perf.exports.run_folder import write_inputs

    loads = [one for one in load.loads() for _ in range(load.num_runs)]
    runs: list[RunResult] = []
    with open_generator(endpoint, load, inputs, output) as generator:
        for number, (plan, warm_up) in enumerate(loads):
            label = {"run": number % load.num_runs + 1} if load.num_runs > 1 else {}
            run = run_load(generator, plan, warm_up, inputs, output, label)
            runs.append(run)
            for error in run.errors:
                print_message(error)
            write_inputs(_bodies(generator), exports.write_run(run, output))
            if run.stop_reason in ENDS_SWEEP:
                break
    exports.finish(runs, output)
    return runs


@contextmanager
def open_generator(
    endpoint: EndpointOptions, load: LoadOptions, inputs: InputOptions, output: OutputOptions
) -> Iterator[LoadGenerator]:
    """Start the workers for all loads of `load`, and wait for the model if the options say so. Raises `PerfError`."""
    endpoint = replace(endpoint, keep_text=endpoint.keep_text or output.keep_text)
    if load.prefill_concurrency and not (endpoint.streaming or endpoint.is_engine):
        raise PerfError("--prefill-concurrency: only with --streaming, else there is no first token")
    parse_slos(output.goodput)
    _make_folder(output)
    inputs = _as_many_as_needed(inputs, load)
    plans = [plan for plan, _ in load.loads()]
    workers = load.workers or max(default_workers(plan.concurrency, plan.rate) for plan in plans)
    with _source(inputs, endpoint) as source, LoadGenerator(endpoint, source, workers=workers) as generator:
        if endpoint.wait_for_model:
            generator.wait_for_model(endpoint.wait_for_model)
        yield generator


def run_load(
    generator: LoadGenerator,
    plan: LoadPlan,
    warm_up: LoadPlan | None,
    inputs: InputOptions,
    output: OutputOptions,
    label: dict[str, Any],
) -> RunResult:
    """Run one load with its display and telemetry. `label` is added to the name of the load."""
    from neso.perf import telemetry
    from neso.perf.console import Progress

    endpoint = generator.options
    with Progress(output.ui, load_name(plan) | label, plan.requests, plan.seconds) as progress:
        url = "" if endpoint.is_engine else endpoint.server_urls[0]
        measuring = telemetry.start(output, url)
        try:
            run = generator.run(plan, warm_up=warm_up, on_records=progress.update)
        finally:
            measured = measuring.stop()
    run.telemetry = measured
    run.settings |= {"input": as_json(inputs), "output": as_json(output)}
    run.load |= label
    return run


def _bodies(generator: LoadGenerator) -> Iterator[list[bytes]]:
    """Yield the JSON bodies of each session; nothing for endpoints without JSON bodies.

    Later turns are without the history of their session, which the responses decide.
    """
    options = generator.options
    if options.endpoint_type in TARGETS or options.endpoint_type == "kserve_http":
        return
    endpoint = endpoint_class(options.endpoint_type)(options)
    if endpoint.content_type != "application/json":
        return
    for session in generator.sessions:
        # A request that cannot be built is a failure of the run; here it would only repeat it.
        with suppress(PerfError, ValueError, KeyError, IndexError, TypeError):
            yield [endpoint.body(request, request.model or options.models[0], []) for request in session]


def _make_folder(output: OutputOptions) -> None:
    """Create the folder of the results, before the load rather than after it. Raises `PerfError`."""
    try:
        output.artifact_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PerfError(f"--artifact-dir {output.artifact_dir}: {error.strerror or error}") from None


def _as_many_as_needed(inputs: InputOptions, load: LoadOptions) -> InputOptions:
    """Return the options with only as many synthetic requests or sessions as a run sends."""
    if load.request_count is None or load.warm_up_duration is not None:
        return inputs
    if inputs.input_file is not None or inputs.input_dataset is not None:
        return inputs
    number = max(load.request_count, load.warm_up_requests or 0)
    return replace(inputs, num_entries=min(inputs.num_entries, number))


@contextmanager
def _source(inputs: InputOptions, endpoint: EndpointOptions) -> Iterator[InputSource | Iterable[PerfRequest]]:
    """Yield the requests; those of tensor models follow the metadata that the server has of the model."""
    convention = _convention(endpoint)
    if convention is None or convention.kind != "tensor" or inputs.input_file is not None:
        if inputs.shared_memory != "none":
            raise PerfError(
                "--shared-memory: only for tensor models of endpoint types kserve_http and kserve_grpc"
            )
        source = open_source(inputs, endpoint.endpoint_type, endpoint.models)
        if convention is not None and convention.kind == "engine":
            yield WithTokenIds(source, tokenizer_for(inputs, endpoint.models))
        else:
            yield source
        return
    from neso.perf.inputs.tensors import TensorSource, TensorSpec

    metadata = convention.metadata
    specs = tuple(TensorSpec(*spec) for spec in metadata.inputs)
    tensor_source = with_extra_inputs(
        TensorSource(specs, inputs, metadata.max_batch_size, metadata.is_sequence), inputs
    )
    if inputs.shared_memory == "none":
        yield tensor_source
        return
    from neso.perf.client.shared_memory import shared_requests

    requests = list(tensor_source.requests())
    with shared_requests(
        endpoint,
        metadata,
        requests,
        batch=inputs.batch_size_text,
        output_size=inputs.output_shared_memory_size,
    ) as shared:
        yield shared


def _convention(endpoint: EndpointOptions) -> Convention | None:
    """Return the tensors of a KServe model by the metadata that the server has of it; None for other endpoints."""
    if not (endpoint.is_grpc or endpoint.endpoint_type == "kserve_http"):
        return None
    from neso.perf.client.grpc import grpc_metadata
    from neso.perf.endpoints.kserve import Convention, http_metadata

    return Convention(
        endpoint.backend, grpc_metadata(endpoint) if endpoint.is_grpc else http_metadata(endpoint)
    )


def exit_status(runs: list[RunResult]) -> int:
    """Return 0 if the last run was completed with a success, 130 after Ctrl-C, else 1."""
    last = runs[-1]
    if last.stop_reason == "interrupted":
        return 130
    measured: Any = last.records.ok & ~last.records.columns["warm_up"]
    return 0 if last.stop_reason not in ENDS_SWEEP and bool(measured.any()) else 1
