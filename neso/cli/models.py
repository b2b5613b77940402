"""`neso models` and `neso pull`: what a server serves, and the models on this machine."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

DEFAULT_URL = "http://localhost:8000"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. `runs`: what executes it; "" if its files do not say."""

    name: str
    source: str
    architecture: str
    runs: str
    size: int
    path: str


def models(
    url: Annotated[str, typer.Option(help="KServe HTTP port of the server.")] = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models of a server, and the models that ship with Neso or are in the cache of the Hugging Face hub."""
    served, failure = _served(url)
    local = [*shipped_models(), *cached_models()]
    if as_json:
        print(json.dumps({"served": served, "local": [asdict(model) for model in local]}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if served is None:
        print(f"no server at {url}: {failure}\n", file=sys.stderr)
    else:
        table = Table("model", "version", "state", "reason", title=f"served at {url}")
        for entry in served:
            fields = (str(entry.get(key, "")) for key in ("name", "version", "state", "reason"))
            table.add_row(*fields)
        console.print(table)
    table = Table("name", "source", "architecture", "runs on", "size", title="on this machine")
    for model in local:
        table.add_row(model.name, model.source, model.architecture, model.runs, _size(model.size))
    console.print(table)


def pull(
    model: Annotated[str, typer.Argument(help="Name on the Hugging Face hub: ORGANIZATION/NAME.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit. Default: the main branch.")
    ] = None,
) -> None:
    """Download a model to the cache of the Hugging Face hub, so that `neso serve` starts without the network.

    Private and restricted models need the environment variable HF_TOKEN. HF_HOME sets the folder of the cache.
    """
    from neso.engine.weights.hub import ModelNotFound, resolve_model

    started = time.perf_counter()
    try:
        path = resolve_model(model, revision)
    except ModelNotFound as error:
        typer.echo(f"neso pull: {error}", err=True)
        raise typer.Exit(1) from None
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    found = _describe(path)
    typer.echo(
        f"{path}\n{_size(size)}, {found[0]}, runs on {found[1]}, {time.perf_counter() - started:.1f} s"
    )


def shipped_models() -> list[LocalModel]:
    """Return the models that are part of the package."""
    from neso.models import SHIPPED_MODELS

    return [_local(name, "ships with Neso", path) for name, path in SHIPPED_MODELS.items()]


def cached_models() -> list[LocalModel]:
    """Return the models in the cache of the Hugging Face hub, the last used first."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    found = []
    for repo in sorted(repos, key=lambda one: one.last_accessed, reverse=True):
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda revision: revision.last_modified)
            found.append(_local(repo.repo_id, "hub cache", newest.snapshot_path))
    return found


def _local(name: str, source: str, path: Path) -> LocalModel:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return LocalModel(name, source, *_describe(path), size, str(path))


def _describe(path: Path) -> tuple[str, str]:
    """Return the architecture of a checkpoint and what executes it."""
    from neso.engine.specs.registry import ARCHITECTURES, ENCODER_ARCHITECTURES
    from neso.engine.specs.vision_spec import VISION_ARCHITECTURES

    if path.suffix == ".gguf" or any(path.glob("*.gguf")):
        return "GGUF", "llm"
    try:
        config = json.loads((path / "config.json").read_bytes())
        names: Sequence[Any] = config.get("architectures") or [config.get("model_type", "")]
        name = str(names[0])
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return "", "unknown"
    if name in ENCODER_ARCHITECTURES:
        return name, "embedding"
    # Any other decoder runs through `transformers`; it is not known before it is loaded.
    return name, "llm" if name in {
        **ARCHITECTURES,
        **VISION_ARCHITECTURES,
    } else "llm, if transformers has a decoder for it"


def _served(url: str) -> tuple[list[dict[str, Any]] | None, str]:
    """Return the repository index of a server, or None and the reason why there is none."""
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/v2/repository/index", b"{}", method="POST")
        with urllib.request.urlopen(request, timeout=5) as response:
            entries = json.load(response)
        if isinstance(entries, list):
            return entries, ""
        return None, "it does not speak KServe v2"
    except urllib.error.HTTPError as error:
        return None, f"it responded with status {error.code}"
    except urllib.error.URLError as error:
        return None, str(error.reason)
    except (OSError, ValueError) as error:
        return None, str(error)


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
