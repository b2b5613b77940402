from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from neso.perf.errors import PerfError
from neso.perf.records import UNKNOWN, Records, RequestRecord
from neso.perf.requests import PerfRequest, sessions_of

RECORDS = [
    RequestRecord(
        "m", number=0, start_ns=5, arrivals_ns=[7, 9], event_tokens=[1, 2], end_ns=10, output_text="a"
    ),
    RequestRecord("m", number=1, error_kind="timeout", error_message="no response", warm_up=True),
    RequestRecord("n", session="s", turn=2, number=2, arrivals_ns=[4], status=200, cancelled=True),
    RequestRecord("m", number=3, arrivals_ns=[1, 2, 3], output_tokens=3),
]


def test_columns_give_back_the_records() -> None:
    records = Records.of(RECORDS)
    assert list(records) == RECORDS
    assert records.ok.tolist() == [True, False, False, True]
    assert records.columns["output_tokens"].tolist() == [UNKNOWN, UNKNOWN, UNKNOWN, 3]


def test_saved_records_are_the_same_after_loading(tmp_path: Path) -> None:
    records = Records.of(RECORDS)
    records.save(tmp_path / "raw.npz")
    loaded = Records.load(tmp_path / "raw.npz")
    assert list(loaded) == RECORDS
    assert loaded.epoch_offset_ns == records.epoch_offset_ns


def test_parts_are_joined_in_order() -> None:
    parts = [Records.of(RECORDS[:1]), Records.of([]), Records.of(RECORDS[1:])]
    assert list(Records.concatenate(parts)) == RECORDS
    assert len(Records.concatenate([])) == 0


def test_selected_rows_keep_their_arrivals() -> None:
    records = Records.of(RECORDS)
    assert list(records.select(np.array([3, 0]))) == [RECORDS[3], RECORDS[0]]
    assert list(records.select(records.columns["warm_up"])) == [RECORDS[1]]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"not a zip file")
    with pytest.raises(PerfError, match="not raw data"):
        Records.load(tmp_path / "other")


def test_consecutive_requests_of_a_session_are_grouped() -> None:
    requests = [
        PerfRequest("1", session="a"),
        PerfRequest("2", session="a", turn=1),
        PerfRequest("3"),
        PerfRequest("4"),
    ]
    assert [[one.text for one in session] for session in sessions_of(requests)] == [["1", "2"], ["3"], ["4"]]
