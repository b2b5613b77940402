"""Requests of files: JSON lines of genai-perf and aiperf, folders of them, inputs.json, and CSV traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from neso.engine.text.tokenizer import Tokenizer
from neso.perf.errors import PerfError
from neso.perf.inputs.images import image_url
from neso.perf.inputs.options import InputOptions
from neso.perf.inputs.synthetic import (
    EMBEDDINGS,
    RANKINGS,
    gives_output_length,
    length_mix,
    tokenizer_for,
    with_output_length,
)
from neso.perf.inputs.traces import TraceRow, TraceWriter, read_csv_trace, row_of, scheduled
from neso.perf.requests import PerfRequest, sessions_of

_LINES = (
    '{"text": …}, {"texts": […]}, {"image": …}, {"messages": […]}, {"payload": {…}}, '
    '{"session_id": …, "turns": […]}, {"query": …, "passages": […]}, {"input_length": …}'
)
_OWN = {
    "text", "text_input", "texts", "prompt", "image", "images", "system", "role", "messages", "payload", "timestamp",
    "delay", "session_id", "turns", "model", "output_length", "max_tokens", "query", "passages", "type",
}  # fmt: skip
"""Fields of a line; all others go into the body of the request."""


@dataclass(frozen=True)
class FileSource:
    """Requests of `options.input_file`."""

    options: InputOptions
    kind: str
    models: tuple[str, ...] = ()

    def requests(self) -> Iterator[PerfRequest]:
        """Yield the requests of the file, in the order of the sampling strategy. Raises `PerfError`."""
        sessions = sessions_of(self._entries())
        if not sessions:
            raise PerfError(f"{self.path}: the file has no requests")
        rng = np.random.default_rng(self.options.random_seed)
        mix = length_mix(self.options)
        drawn = gives_output_length(self.options)
        for number, session in enumerate(sampled(sessions, self.options, rng)):
            for request in session:
                if request.session and self.options.sampling_strategy == "random":
                    request = replace(request, session=f"{request.session}-{number}")
                if request.max_tokens is None and drawn:
                    request = with_output_length(request, mix.sample(rng)[1], self.options)
                yield request

    @cached_property
    def path(self) -> Path:
        """The file or folder."""
        given = str(self.options.input_file)
        return Path(given.removeprefix("payload:")).expanduser()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return tokenizer_for(self.options, self.models)

    def _entries(self) -> Iterator[PerfRequest]:
        path, kind = self.path, self.options.input_file_type
        if not path.exists():
            raise PerfError(f"--input-file {path}: there is no such file or folder")
        if path.is_dir():
            yield from self._pools(path)
        elif path.suffix == ".csv":
            yield from self._trace(read_csv_trace(path, kind))
        elif path.suffix == ".json":
            yield from _recorded(path)
        else:
            lines = read_lines(path)
            if kind == "random_pool":
                yield from self._drawn([[one for line in lines for one in self._requests(line)]])
            elif lines and "input_length" in lines[0]:
                yield from self._trace([self._row(line) for line in lines])
            else:
                if kind.endswith("_trace"):
                    raise PerfError(f"{path}: a line of a {kind} needs input_length")
                for line in lines:
                    yield from self._requests(line)

    def _row(self, line: dict[str, Any]) -> TraceRow:
        if "input_length" not in line:
            raise PerfError(f"{self.path}: all lines of a trace need input_length, got {_short(line)}")
        return row_of(line)

    def _trace(self, rows: Sequence[TraceRow]) -> Iterator[PerfRequest]:
        return TraceWriter(self._tokenizer, self.options).requests(scheduled(rows, self.options))

    def _requests(self, line: dict[str, Any]) -> Iterator[PerfRequest]:
        """Yield the request of a line, or the turns of its session."""
        try:
            if "turns" in line:
                session = str(line.get("session_id") or f"session-{id(line)}")
                for number, turn in enumerate(line["turns"]):
                    content = {"text": turn} if isinstance(turn, str) else turn
                    yield replace(self._request(content), session=session, turn=number)
                return
            yield self._request(line)
        except (TypeError, ValueError, AttributeError) as error:
            raise PerfError(f"{self.path}: invalid line {_short(line)}: {error}") from None

    def _request(self, line: dict[str, Any]) -> PerfRequest:
        if "text" in line and "text_input" in line:
            raise PerfError(f"{self.path}: text and text_input cannot be in one line: {_short(line)}")
        texts = [str(text) for text in line.get("texts") or ()]
        text = line.get("text", line.get("text_input", line.get("prompt")))
        images = [*(line.get("images") or ()), *([line["image"]] if line.get("image") else [])]
        if not (text is not None or texts or images or {"messages", "payload", "query"} & line.keys()):
            raise PerfError(f"{self.path}: cannot use the line {_short(line)}; expected one of {_LINES}")
        limit = line.get("output_length", line.get("max_tokens"))
        request = PerfRequest(
            text="\n".join(texts) if text is None else str(text),
            system=str(line.get("system") or ""),
            messages=line.get("messages"),
            payload=line.get("payload"),
            query=str(line.get("query") or ""),
            passages=[_passage(one) for one in line["passages"]] if line.get("passages") else None,
            images=[image_url(str(_content(one)), self.path.parent) for one in images] or None,
            model=str(line.get("model") or ""),
            max_tokens=None if limit is None else int(limit),
            delay_ms=float(line.get("delay") or 0)
            * self.options.session_delay_ratio
            / self.options.replay_speedup,
            timestamp_ms=None
            if line.get("timestamp") is None
            else float(line["timestamp"]) / self.options.replay_speedup,
            extra={name: value for name, value in line.items() if name not in _OWN},
        )
        if self.kind in EMBEDDINGS:
            request.texts = texts or [request.text]
        return request

    def _pools(self, folder: Path) -> Iterator[PerfRequest]:
        """Yield requests that combine one random entry of each file of a folder."""
        files = sorted(folder.glob("*.jsonl"))
        if not files:
            raise PerfError(f"--input-file {folder}: the folder has no .jsonl files")
        pools = {
            file.stem: [one for line in read_lines(file) for one in self._requests(line)] for file in files
        }
        if empty := [name for name, pool in pools.items() if not pool]:
            raise PerfError(f"--input-file {folder}: no lines in {', '.join(empty)}")
        if self.kind in RANKINGS:
            yield from self._rankings(pools)
        else:
            yield from self._drawn(list(pools.values()))

    def _rankings(self, pools: dict[str, list[PerfRequest]]) -> Iterator[PerfRequest]:
        if not {"queries", "passages"} <= pools.keys():
            raise PerfError(f"{self.path}: rankings need queries.jsonl and passages.jsonl")
        rng = np.random.default_rng(self.options.random_seed)
        passages = pools["passages"]
        number = round(self.options.rankings_passages_mean)
        for _ in range(self.options.num_entries):
            query = pools["queries"][int(rng.integers(len(pools["queries"])))]
            chosen = [passages[int(i)].text for i in rng.integers(len(passages), size=number)]
            yield PerfRequest(query=query.text, passages=chosen)

    def _drawn(self, pools: list[list[PerfRequest]]) -> Iterator[PerfRequest]:
        """Yield requests whose texts and images are drawn from pools: a batch of each pool."""
        rng = np.random.default_rng(self.options.random_seed)
        size = self.options.batch_size_text if self.kind in EMBEDDINGS else 1
        for _ in range(self.options.num_entries):
            drawn = [pool[int(i)] for pool in pools for i in rng.integers(len(pool), size=size)]
            texts = [one.text for one in drawn if one.text]
            images = [image for one in drawn for image in one.images or ()]
            yield replace(
                drawn[0],
                text="\n".join(texts),
                texts=texts if self.kind in EMBEDDINGS else None,
                images=images or None,
            )


def sampled(
    sessions: list[list[PerfRequest]], options: InputOptions, rng: np.random.Generator
) -> Iterator[list[PerfRequest]]:
    """Yield sessions in the order of `dataset_sampling_strategy`."""
    if options.sampling_strategy == "sequential":
        yield from sessions
    elif options.sampling_strategy == "shuffle":
        yield from (sessions[int(i)] for i in rng.permutation(len(sessions)))
    else:
        yield from (sessions[int(i)] for i in rng.integers(len(sessions), size=options.num_entries))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file. Raises `PerfError` with the number of an invalid line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PerfError(f"--input-file {path}: {error.strerror}") from None
    found = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except ValueError as error:
            raise PerfError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise PerfError(f"{path}, line {number}: expected a JSON object, got {_short(value)}")
        found.append(value)
    return found


def _recorded(path: Path) -> Iterator[PerfRequest]:
    """Yield the requests of an inputs.json of genai-perf, aiperf or neso perf."""
    try:
        entries = orjson.loads(path.read_bytes())["data"]
        for number, entry in enumerate(entries):
            payloads = entry.get("payloads", entry.get("payload"))
            for turn, payload in enumerate(payloads):
                session = f"session-{number}" if len(payloads) > 1 else ""
                yield PerfRequest(payload=dict(payload), session=session, turn=turn)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PerfError(f'{path}: expected {{"data": [{{"payload": [{{…}}]}}]}}: {error}') from None


def _content(value: Any) -> Any:
    """Return the content of {"contents": …} or {"url": …} objects, any other value unchanged."""
    if isinstance(value, dict):
        found = value.get("contents", value.get("url", ""))
        return found[0] if isinstance(found, list) and found else found
    return value


def _passage(value: Any) -> str:
    return str(value.get("text", "")) if isinstance(value, dict) else str(value)


def _short(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 120 else f"{text[:117]}…"
