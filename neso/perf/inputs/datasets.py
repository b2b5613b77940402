"""Requests of datasets on the Hugging Face hub, by name.

Rows come from the hub's dataset server, so that only the rows in use are downloaded.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import orjson

from neso.engine.text.tokenizer import Tokenizer
from neso.perf.errors import PerfError
from neso.perf.inputs.files import sampled
from neso.perf.inputs.options import InputOptions
from neso.perf.inputs.synthetic import (
    EMBEDDINGS,
    gives_output_length,
    length_mix,
    tokenizer_for,
    with_output_length,
)
from neso.perf.requests import PerfRequest

DATASETS_SERVER = "https://datasets-server.huggingface.co"
"""The environment variable NESO_DATASETS_SERVER replaces it."""
_PAGE = 100
_TIMEOUT = 30.0
_PROMPT_COLUMNS = (
    "prompt", "question", "instruction", "query", "input", "text", "article", "messages", "conversations", "turns",
)  # fmt: skip
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


@dataclass(frozen=True)
class KnownDataset:
    """A dataset with a short name."""

    name: str
    prompt: str
    subset: str = ""
    system: str = ""
    output: str = ""
    instruction: str = ""
    """Text before each prompt."""


KNOWN = {
    "openorca": KnownDataset("Open-Orca/OpenOrca", "question", system="system_prompt", output="response"),
    "cnn_dailymail": KnownDataset(
        "abisee/cnn_dailymail",
        "article",
        subset="3.0.0",
        output="highlights",
        instruction="Summarize the following article.\n\n",
    ),
}


@dataclass(frozen=True)
class DatasetSource:
    """Requests of the dataset `options.input_dataset`."""

    options: InputOptions
    kind: str
    models: tuple[str, ...] = ()

    def requests(self) -> Iterator[PerfRequest]:
        """Yield the requests of the first `num_entries` rows. Raises `PerfError`, also if the hub is unreachable."""
        rng = np.random.default_rng(self.options.random_seed)
        mix = length_mix(self.options)
        drawn = gives_output_length(self.options)
        rows = [[request] for request in self._rows()]
        if not rows:
            raise PerfError(f"--input-dataset {self.options.input_dataset}: the dataset has no usable rows")
        for (request,) in sampled(rows, self.options, rng):
            yield with_output_length(request, mix.sample(rng)[1], self.options) if drawn else request

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return tokenizer_for(self.options, self.models)

    def _rows(self) -> Iterator[PerfRequest]:
        given, options = str(self.options.input_dataset), self.options
        known = KNOWN.get(given.lower().replace("-", "_"), KnownDataset(given, ""))
        prompt = options.dataset_prompt_column or known.prompt
        system = options.dataset_system_column or known.system
        output = options.dataset_output_column or known.output
        subset = options.dataset_subset or known.subset
        for row in read_rows(known.name, subset, options.dataset_split, options.num_entries):
            column = prompt or next((name for name in _PROMPT_COLUMNS if name in row), "")
            if column not in row:
                raise PerfError(
                    f"--input-dataset {given}: no column '{column or ', '.join(_PROMPT_COLUMNS)}'; "
                    f"there are {', '.join(row)}; choose one by --dataset-prompt-column"
                )
            text = prompt_of(row[column])
            if not text.strip():
                continue
            request = PerfRequest(text=known.instruction + text, system=str(row.get(system) or ""))
            if self.kind in EMBEDDINGS:
                request.texts = [request.text]
            request.input_tokens = self._count(request.text)
            answer = row.get(output)
            if isinstance(answer, str) and answer:
                request.max_tokens = max(1, self._count(answer))
            yield request

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))


def prompt_of(value: Any) -> str:
    """Return the prompt of a column: a text, or the first user message of a conversation; "" if there is none."""
    if isinstance(value, str):
        return value
    for message in value if isinstance(value, list) else ():
        if isinstance(message, str):
            return message
        if isinstance(message, dict):
            role = str(message.get("role", message.get("from", "user")))
            content = message.get("content", message.get("value", ""))
            if _ROLES.get(role, role) == "user" and isinstance(content, str):
                return content
    return ""


def read_rows(name: str, subset: str, split: str | None, number: int) -> Iterator[dict[str, Any]]:
    """Yield up to `number` rows of a dataset, from the hub's dataset server. Raises `PerfError`.

    The split is by default "train", else the first one.
    """
    splits = _get(name, "/splits", {"dataset": name}).get("splits") or []
    chosen = choose_split(name, splits, subset, split)
    offset = 0
    while offset < number:
        length = min(_PAGE, number - offset)
        page = _get(name, "/rows", {"dataset": name, **chosen, "offset": offset, "length": length})
        rows = page.get("rows") or []
        yield from (row["row"] for row in rows)
        offset += len(rows)
        if len(rows) < length:
            return


def choose_split(name: str, splits: list[dict[str, Any]], subset: str, split: str | None) -> dict[str, str]:
    """Return the parameters `config` and `split` of a request for rows. Raises `PerfError` if there are none."""
    found = [one for one in splits if subset in ("", one.get("config")) and split in (None, one.get("split"))]
    if not found:
        names = ", ".join(f"{one.get('config')}/{one.get('split')}" for one in splits)
        raise PerfError(f"--input-dataset {name}: no such subset or split; there are {names or 'none'}")
    train = next((one for one in found if one.get("split") == "train"), found[0])
    return {"config": str(train["config"]), "split": str(train["split"])}


def _get(name: str, path: str, parameters: dict[str, Any]) -> dict[str, Any]:
    server = os.environ.get("NESO_DATASETS_SERVER", DATASETS_SERVER)
    request = urllib.request.Request(f"{server}{path}?{urllib.parse.urlencode(parameters)}")
    if token := os.environ.get("HF_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            found: dict[str, Any] = orjson.loads(answer.read())
            return found
    except urllib.error.HTTPError as error:
        raise PerfError(
            f"--input-dataset {name}: the hub answers {error.code}; expected {', '.join(KNOWN)} or a dataset on "
            "huggingface.co (a private or gated one needs HF_TOKEN)"
        ) from None
    except (OSError, ValueError) as error:
        raise PerfError(
            f"--input-dataset {name}: the Hugging Face hub cannot be reached ({error}); offline, give a local file "
            "by --input-file"
        ) from None
