"""Replay of traces: prompts with the lengths, shared prefixes and timestamps of recorded requests.

Formats: Mooncake and genai-perf (JSON lines with `input_length`, `output_length`, `hash_ids`, `timestamp` in ms), Azure
(CSV with TIMESTAMP, ContextTokens, GeneratedTokens) and BurstGPT (CSV with Timestamp in s, Request tokens, Response
tokens).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from neso.engine.text.tokenizer import Tokenizer
from neso.perf.errors import PerfError
from neso.perf.inputs.options import InputOptions
from neso.perf.inputs.synthetic_text import SyntheticText
from neso.perf.requests import PerfRequest


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request; times in milliseconds."""

    input_length: int
    output_length: int | None = None
    timestamp: float | None = None
    hash_ids: tuple[int, ...] = ()
    session: str = ""
    delay: float = 0.0


def row_of(line: dict[str, Any]) -> TraceRow:
    """Return the row of a line with `input_length`. Raises `PerfError` for values of the wrong type."""
    try:
        length = int(line["input_length"])
        output = line.get("output_length")
        time = line.get("timestamp")
        row = TraceRow(
            input_length=length,
            output_length=None if output is None else int(output),
            timestamp=None if time is None else float(time),
            hash_ids=tuple(int(one) for one in line.get("hash_ids") or ()),
            session=str(line.get("session_id") or ""),
            delay=float(line.get("delay") or 0),
        )
    except (TypeError, ValueError) as error:
        raise PerfError(f"invalid trace values: {error}") from None
    if row.input_length < 1 or (row.output_length is not None and row.output_length < 1):
        raise PerfError(f"lengths must be at least 1, got {row.input_length} and {row.output_length}")
    return row


def read_csv_trace(path: Path, kind: str) -> list[TraceRow]:
    """Read a trace of Azure or BurstGPT; `kind` is auto, azure_trace or burst_gpt_trace. Raises `PerfError`.

    Rows without input or output tokens are failures in both traces; they are left out.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = {name.strip().lower(): name for name in reader.fieldnames or ()}
            azure = {"timestamp", "contexttokens", "generatedtokens"} <= set(names)
            burst = {"timestamp", "request tokens", "response tokens"} <= set(names)
            if (
                (not azure and not burst)
                or (kind == "azure_trace" and not azure)
                or (kind == "burst_gpt_trace" and not burst)
            ):
                raise PerfError(
                    f"{path}: expected the columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure), or "
                    f"Timestamp, Request tokens, Response tokens (BurstGPT), found {', '.join(names) or 'none'}"
                )
            tokens = ("contexttokens", "generatedtokens") if azure else ("request tokens", "response tokens")
            rows = []
            for number, line in enumerate(reader, 2):
                try:
                    stamp = line[names["timestamp"]]
                    ms = _date_ms(stamp) if azure else float(stamp) * 1e3
                    read, written = (int(float(line[names[name]])) for name in tokens)
                except (TypeError, ValueError) as error:
                    raise PerfError(f"{path}, line {number}: {error}") from None
                if read > 0 and written > 0:
                    rows.append(TraceRow(read, written, ms))
            return rows
    except OSError as error:
        raise PerfError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PerfError(f"{path}: {error}") from None


def _date_ms(text: str) -> float:
    """Return milliseconds of a date and time, which may have seven digits of a second."""
    base, _, fraction = text.strip().partition(".")
    digits = fraction.split("+")[0].rstrip("Z")
    return datetime.fromisoformat(base).timestamp() * 1e3 + (float(f"0.{digits}") * 1e3 if digits else 0.0)


def scheduled(rows: Iterable[TraceRow], options: InputOptions) -> list[TraceRow]:
    """Return the rows of the schedule's window in the order of time, with times from its start, sped up."""
    kept = list(rows)
    timed = [row for row in kept if row.timestamp is not None]
    if not timed:
        return [replace(row, delay=row.delay / options.replay_speedup) for row in kept]
    if len(timed) < len([row for row in kept if not row.session]):
        raise PerfError("either all rows of a trace have a timestamp, or none")
    first = min(row.timestamp for row in timed if row.timestamp is not None)
    start = first if options.schedule_start_ms is None else options.schedule_start_ms
    end = float("inf") if options.schedule_end_ms is None else options.schedule_end_ms
    inside = [
        replace(
            row,
            timestamp=None if row.timestamp is None else (row.timestamp - start) / options.replay_speedup,
            delay=row.delay / options.replay_speedup,
        )
        for row in kept
        if row.timestamp is None or start <= row.timestamp <= end
    ]
    if not inside:
        raise PerfError(f"the trace has no request between {start:g} and {end:g} ms")
    return _by_session(inside)


def _by_session(rows: list[TraceRow]) -> list[TraceRow]:
    """Order rows by the time of their session's first row, with the rows of a session together."""
    sessions: dict[str, list[TraceRow]] = {}
    for number, row in enumerate(rows):
        sessions.setdefault(row.session or f"\0{number}", []).append(row)
    groups = sorted(sessions.values(), key=lambda group: group[0].timestamp or 0.0)
    return [row for group in groups for row in group]


class TraceWriter:
    """Writes the prompts of a trace.

    A hash id stands for a block of `trace_block_size` tokens. Prompts with the same hash ids start with the same text.
    """

    def __init__(self, tokenizer: Tokenizer, options: InputOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._blocks: dict[int, str] = {}

    def requests(self, rows: Iterable[TraceRow]) -> Iterator[PerfRequest]:
        """Yield a request for each row."""
        turns: dict[str, int] = {}
        for number, row in enumerate(rows):
            turn = turns.get(row.session, 0)
            turns[row.session] = turn + 1
            yield PerfRequest(
                text=self._text(row, number),
                input_tokens=row.input_length if turn == 0 or not row.session else None,
                max_tokens=row.output_length,
                min_tokens=row.output_length if self._options.output_tokens_deterministic else None,
                timestamp_ms=row.timestamp,
                session=row.session,
                turn=turn if row.session else 0,
                delay_ms=row.delay * self._options.session_delay_ratio,
            )

    def _text(self, row: TraceRow, number: int) -> str:
        size = self._options.trace_block_size
        whole = min(len(row.hash_ids), (row.input_length - 1) // size)
        shared = "".join(self._block(one, size) for one in row.hash_ids[:whole])
        # The last, partial block has a hash id too: its text is a function of the id, not of the row.
        last = (1, row.hash_ids[whole]) if len(row.hash_ids) > whole else (2, number)
        return self._writer(last).text(row.input_length, after=shared.lstrip(" "))

    def _block(self, hash_id: int, size: int) -> str:
        if hash_id not in self._blocks:
            self._blocks[hash_id] = " " + self._writer((1, hash_id)).text(size)
        return self._blocks[hash_id]

    def _writer(self, key: tuple[int, int]) -> SyntheticText:
        seed = [self._options.random_seed, *(abs(one) for one in key)]
        return SyntheticText(self._tokenizer, np.random.default_rng(seed))
