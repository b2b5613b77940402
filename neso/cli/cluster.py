"""`neso cluster status`: the workers, roles, queues, transfers and stages of a server, or of NATS, as tables."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from neso.cluster.jetstream.connection import NatsOptions

cluster = typer.Typer(help="Show the workers of a server.", no_args_is_help=True)

_WORKER = "neso_worker_"
_CLUSTER = "neso_cluster_"
_COLUMNS = {
    "requests": "decode",
    "exported_prompts": "prefill",
    "prefill_tokens": "tokens",
    "free_sequences": "free",
    "kv_cache_usage": "cache",
    "prefill_tokens_per_second": "tokens/s",
    "inter_token_seconds": "ITL ms",
}
_ROWS = {
    "queued_requests": "requests in the queue",
    "queue_oldest_seconds": "oldest request, s",
    "queue_predicted_seconds": "predicted wait, s",
    "grants_total": "attempts",
    "retries_total": "repeated because a worker was lost",
    "failed_requests_total": "failed because workers were lost",
    "lost_workers_total": "lost workers",
    "stale_frames_total": "dropped outputs of earlier attempts",
    "remote_prefills_total": "prompts computed by another worker",
    "imported_tokens_total": "transferred prompt tokens",
    "fallbacks_total": "long prompts computed by the decode worker",
    "role_changes_total": "changed roles",
}
_STAGE = "neso_stage_"
_STAGE_COLUMNS = {
    "workers": "workers",
    "worker_requests": "running",
    "worker_used_slots": "used slots",
    "worker_slots": "slots",
    "queued_requests": "queued",
    "queue_oldest_seconds": "oldest, s",
    "grants_total": "attempts",
    "retries_total": "repeated",
    "failed_requests_total": "failed",
    "lost_workers_total": "lost",
    "kept_bytes_total": "kept MB",
}


@cluster.callback()
def _commands() -> None:
    """Show the workers of a server."""


@cluster.command()
def status(
    url: Annotated[str, typer.Option(help="Metrics of the server.")] = "http://localhost:8002/metrics",
    join: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of NATS: print the servers and workers of all its queues instead.",
        ),
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="File with the token of NATS.")
    ] = None,
    credentials_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="File with the credentials of a NATS user.")
    ] = None,
    nkey_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="File with the seed of an NKEY of NATS.")
    ] = None,
    password_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="File with USER:PASSWORD for NATS.")
    ] = None,
    ca_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="File with the certificates that verify NATS.")
    ] = None,
    cert_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="File with the client certificate for NATS.")
    ] = None,
    key_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="File with the key of --cert-file.")
    ] = None,
) -> None:
    """Print the workers, their roles, the queue and the transfers of each model on workers, and the stages."""
    if join is not None:
        from neso.cluster.jetstream.connection import NatsOptions

        options = NatsOptions(
            urls=join,
            queue="",
            token_file=token_file,
            credentials_file=credentials_file,
            nkey_file=nkey_file,
            password_file=password_file,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
        )
        _show(_queue_tables(options))
    else:
        _show(_server_tables(url))


def _show(tables: list[Table]) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # so that no title of the stages is cut off
    for table in tables:
        console.print(table)


def _fail(message: str) -> NoReturn:
    print(f"neso cluster status: {message}", file=sys.stderr)
    raise typer.Exit(1)


def _queue_tables(options: NatsOptions) -> list[Table]:
    import asyncio

    from rich.table import Table

    from neso.cluster.jetstream.connection import Member, NatsConnection
    from neso.engine.cluster_config import is_nats
    from neso.engine.errors import EngineError

    if not is_nats(options.urls):
        _fail(f"--join must begin with nats://, got '{options.shown}'")

    async def read() -> dict[str, tuple[int, list[Member]]]:
        connection = await NatsConnection.connect(options, "neso cluster status")
        try:
            return await connection.queues()
        finally:
            await connection.close()

    try:
        queues = asyncio.run(read())
    except EngineError as error:
        _fail(str(error))
    if not queues:
        _fail(f"there is no queue at {options.shown}")
    tables = []
    for queue, (requests, members) in sorted(queues.items()):
        table = Table(title=f"queue '{queue}': {requests} requests")
        for title in ("", "name", "roles", "host", "process", "version", "model", "requests", "free"):
            table.add_column(title, no_wrap=True)
        for one in members:
            load = (str(one.requests), str(one.free_sequences)) if one.kind == "worker" else ("", "")
            about = (one.kind, one.name, "+".join(one.roles), one.host, str(one.pid), one.version)
            table.add_row(*about, one.model[:12], *load)
        tables.append(table)
    return tables


def _server_tables(url: str) -> list[Table]:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            text = response.read().decode()
    except (OSError, ValueError) as error:
        _fail(f"{url}: {error}")
    tables = status_tables(text)
    if not tables:
        _fail(f"no model of the server at {url} runs on workers")
    return tables


def status_tables(metrics: str) -> list[Table]:
    """Return the tables of each model, its workers and its queue, and that of the stages.

    `metrics`: in Prometheus' text format.
    """
    from rich.table import Table

    tables = []
    for model, (workers, queue) in _values(metrics).items():
        table = Table(title=model)
        for title in ("worker", "roles", *_COLUMNS.values()):
            table.add_column(title, no_wrap=True)
        for (worker, roles), values in sorted(workers.items()):
            table.add_row(worker, roles, *(_cell(name, values.get(name, 0.0)) for name in _COLUMNS))
        tables.append(table)
        table = Table("queue and transfers", "")
        for name, title in _ROWS.items():
            table.add_row(title, _cell(name, queue.get(name, 0.0)))
        tables.append(table)
    stages = _stages(metrics)
    if stages:
        table = Table(title="stages")
        for title in ("stage", *_STAGE_COLUMNS.values()):
            table.add_column(title, no_wrap=True)
        for stage, values in sorted(stages.items()):
            table.add_row(stage, *(_cell(name, values.get(name, 0.0)) for name in _STAGE_COLUMNS))
        tables.append(table)
    return tables


def _stages(metrics: str) -> dict[str, dict[str, float]]:
    """Return the values of each stage; those of its workers are added."""
    from prometheus_client.parser import text_string_to_metric_families

    stages: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.startswith(_STAGE):
                stage = f"{sample.labels['model']} (version {sample.labels['version']})"
                values = stages.setdefault(stage, defaultdict(float))
                values[sample.name.removeprefix(_STAGE)] += sample.value
    return stages


_Workers = dict[tuple[str, str], dict[str, float]]


def _values(metrics: str) -> dict[str, tuple[_Workers, dict[str, float]]]:
    """Return the values of each model: by worker and roles, and those of the queue."""
    from prometheus_client.parser import text_string_to_metric_families

    models: dict[str, tuple[_Workers, dict[str, float]]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            labels = sample.labels
            name = sample.name
            if not name.startswith((_WORKER, _CLUSTER)):
                continue
            model = f"{labels['model']} (version {labels['version']})"
            workers, queue = models.setdefault(model, (defaultdict(dict), {}))
            if name.startswith(_WORKER):
                workers[labels["worker"], labels["roles"]][name.removeprefix(_WORKER)] = sample.value
            else:
                queue[name.removeprefix(_CLUSTER)] = sample.value
    return models


def _cell(name: str, value: float) -> str:
    if name == "kv_cache_usage":
        return f"{value:.0%}"
    if name == "kept_bytes_total":
        return f"{value / 1e6:.1f}"
    if name == "inter_token_seconds":
        return f"{value * 1000:.1f}"
    return f"{value:.2f}" if name.startswith("queue_") else f"{value:.0f}"
