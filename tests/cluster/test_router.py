"""`Router`: which worker gets a request, and how long a request waits for a busy worker."""

from __future__ import annotations

import msgspec
import pytest

from neso.cluster.messages import Credits
from neso.cluster.router import (
    MAX_DELAY,
    UNMEASURED_REMOTE_PREFILL,
    Choice,
    Router,
    measure_slowness,
)
from neso.cluster.speed import StepTime
from neso.cluster.work_queue import Job, WorkerState
from neso.engine.client.prefix_estimate import PrefixKeys
from neso.engine.cluster_config import DECODE, PREFILL
from neso.engine.core.prefix_keys import BlockChanges
from neso.engine.core.request import EngineRequest
from neso.engine.core.stats import EngineStats, KvTransferStats
from neso.engine.ipc.messages import EngineInfo
from neso.engine.kv_transfer.format import KvFormat
from neso.generation import LoraRequest, SamplingParams

BLOCK = 16
INFO = EngineInfo("native", 4096, 8, 384, 1024, BLOCK, 2**20, 0.1)
KV_FORMAT = KvFormat(model="", layout="", dtype="float32", block_size=BLOCK, num_parts=1, part_bytes=1000)
FULL, FREE = Credits(), Credits(8, 1000, 1000)


def worker(name: str, credits: Credits = FREE) -> WorkerState:
    state = WorkerState(name, INFO)
    state.update(credits)
    state.observe_prefill(0.1, 100)
    return state


def job(tokens: int = 160, *, lora: str | None = None, first: int = 1) -> Job:
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=[first] * tokens,
        sampling=SamplingParams(),
        max_tokens=1,
        lora=None if lora is None else LoraRequest(name=lora),
    )
    return Job(request, PrefixKeys(request, BLOCK), 0.0)


def holding(state: WorkerState, request: Job) -> WorkerState:
    assert request.keys is not None
    state.blocks.apply(BlockChanges(1, request.keys.keys, complete=True))
    return state


def test_worker_with_the_prefix_is_chosen():
    request = job()
    other, holder = worker("other"), holding(worker("holder"), request)
    assert Router().choose([request], [other, holder], 0.0)[:2] == (request, holder)


def test_worker_with_the_adapter_is_chosen():
    request = job(lora="x")
    other, holder = worker("other"), worker("holder")
    holder.adapters["x"] = 1
    assert Router().choose([request], [other, holder], 0.0).worker is holder


def test_request_waits_a_moment_for_a_busy_worker_with_its_prefix():
    request = job()
    other, holder = worker("other"), holding(worker("holder", FULL), request)
    choice = Router().choose([request], [other, holder], 0.0)
    assert choice.job is None and choice.wake == MAX_DELAY
    assert Router().choose([request], [other, holder], MAX_DELAY).worker is other


def test_request_does_not_wait_longer_than_it_saves():
    request = job(20)
    other, holder = worker("other"), holding(worker("holder", FULL), request)
    choice = Router().choose([request], [other, holder], 0.0)
    assert choice.wake is not None and 0 < choice.wake < MAX_DELAY
    other.speed = StepTime()  # nothing is known
    assert Router().choose([request], [other, holder], 0.0).worker is other


def test_request_behind_a_waiting_one_starts():
    waiting, next_one = job(), job(first=2)
    other, holder = worker("other"), holding(worker("holder", FULL), waiting)
    assert Router().choose([waiting, next_one], [other, holder], 0.0)[:2] == (next_one, other)


def test_request_without_room_holds_up_the_queue():
    large, small = job(160), job(16)
    few_blocks = worker("w", Credits(8, 5, 1000))
    assert few_blocks.has_room(small)
    assert Router().choose([large, small], [few_blocks], 0.0) == Choice()


def test_without_workers_requests_wait():
    assert Router().choose([job()], [], 0.0) == Choice()


def test_workers_with_equal_costs_take_turns():
    workers = [worker(name) for name in "abc"]
    router, counts = Router(), dict.fromkeys("abc", 0)
    for first in range(300):
        request = job(first=1000 + first)  # nothing is in flight at each choice
        chosen = router.choose([request], workers, 0.0).worker
        assert chosen is not None
        chosen.remove(request, chosen.add(request))
        counts[chosen.name] += 1
    assert max(counts.values()) <= 1.3 * min(counts.values())


def test_slow_worker_gets_less():
    slow, fast = worker("slow"), worker("fast")
    slow.speed = StepTime()
    for _ in range(10):
        slow.observe_prefill(0.4, 100)
        fast.observe_prefill(0.1, 100)
    counts = {"slow": 0, "fast": 0}
    for first in range(100):
        request = job(first=1000 + first)
        chosen = Router().choose([request], [slow, fast], 0.0).worker
        assert chosen is not None
        chosen.add(request)
        chosen.update(FREE)
        counts[chosen.name] += 1
    assert 3 <= counts["fast"] / counts["slow"] <= 5


def test_transfer_takes_the_place_of_the_prompt():
    """The fast link outweighs the blocks that the other decode worker holds; without a measured speed, it does not."""
    info = msgspec.structs.replace(INFO, kv_address="ipc://kv", kv_format=KV_FORMAT)
    prefill, holder, linked = (
        WorkerState(name, info, roles)
        for name, roles in (("prefill", PREFILL), ("holder", DECODE), ("linked", DECODE))
    )
    request = job(320)
    assert request.keys is not None
    for one in (prefill, holder, linked):
        one.update(FREE)
        one.observe_prefill(0.1, 100)
    holder.blocks.apply(BlockChanges(1, request.keys.keys[:2], complete=True))
    workers = [prefill, holder, linked]
    assert Router(64).choose([request], workers, 0.0)[1:3] == (holder, prefill)
    linked.stats = EngineStats(kv_transfer=KvTransferStats(imported_bytes=1_000_000_000, import_seconds=1.0))
    assert Router(64).choose([request], workers, 0.0)[1:3] == (linked, prefill)


def test_speed_is_a_line_so_short_prompts_do_not_make_a_worker_slow():
    short, long = worker("short"), worker("long")
    short.speed, long.speed = StepTime(), StepTime()
    for tokens in (4, 8, 12, 16):
        short.observe_prefill(0.010 + 0.001 * tokens, tokens)
        long.observe_prefill(0.010 + 0.001 * 50 * tokens, 50 * tokens)
    assert short.seconds_per_token == pytest.approx(0.001)
    assert long.seconds_per_token == pytest.approx(0.001)


def test_worker_that_was_not_measured_for_long_is_tried_again():
    slow, fast = worker("slow"), worker("fast")
    for _ in range(10):
        slow.observe_prefill(4.0, 100)
        fast.observe_prefill(0.1, 100)
    measure_slowness([slow, fast], 1.0)
    assert (slow.slowness > 10, fast.slowness) == (True, 1.0)
    measure_slowness([slow, fast], 1000.0)
    assert slow.slowness == 1.0


def test_worker_of_both_roles_computes_the_prompt_itself_if_prefill_workers_are_full():
    info = msgspec.structs.replace(INFO, kv_address="ipc://kv")
    prefill, both = WorkerState("prefill", info, PREFILL), WorkerState("both", info)
    both.update(FREE)
    request = job(320)
    assert Router(64).choose([request], [prefill, both], 0.0)[1:3] == (both, None)
    prefill.update(FREE)
    assert Router(64).choose([request], [prefill, both], 0.0)[1:3] == (both, prefill)


# -- where a prompt is computed, by measured times ----------------------------------------------------------------

STEP, TOKEN = 0.008, 0.0001
"""Seconds of a prefill: STEP + TOKEN * tokens."""


def apart(*, measured: bool = True) -> tuple[WorkerState, WorkerState]:
    """Return a prefill worker that was measured, and a decode worker with eight sequences."""
    info = msgspec.structs.replace(INFO, kv_address="ipc://kv", kv_format=KV_FORMAT)
    prefill, decode = WorkerState("prefill", info, PREFILL), WorkerState("decode", info, DECODE)
    for one in (prefill, decode):
        one.update(FREE)
    for tokens in (100, 200, 400, 800, 1600, 3200) if measured else ():
        prefill.observe_prefill(STEP + TOKEN * tokens, tokens)
    decode.num_sequences, decode.itl = 8, STEP
    return prefill, decode


def computed_by(*workers: WorkerState, tokens: int, behind: int = 0, now: float = 0.0) -> str:
    """Return the name of the worker that computes a prompt."""
    window = [job(tokens, first=number + 1) for number in range(behind + 1)]
    choice = Router().choose(window, workers, now)
    assert choice.job is window[0] and choice.worker is not None
    return (choice.prefiller or choice.worker).name


def test_short_prompts_are_local_and_long_ones_are_remote():
    # Eight sequences wait 8 * TOKEN per token of the prompt, which a remote prompt exchanges for a step.
    assert computed_by(*apart(), tokens=8) == "decode"
    assert computed_by(*apart(), tokens=12) == "prefill"
    prefill, decode = apart()
    decode.num_sequences = 1
    assert computed_by(prefill, decode, tokens=70) == "decode"
    assert computed_by(prefill, decode, tokens=90) == "prefill"
    decode.num_sequences = 0
    assert computed_by(prefill, decode, tokens=2000) == "decode"


def test_long_prompts_are_local_while_the_prefill_worker_has_a_queue():
    prefill, decode = apart()
    prefill.num_prefill_tokens = 4000
    assert computed_by(prefill, decode, tokens=400) == "decode"
    assert computed_by(prefill, decode, tokens=1000) == "prefill"
    decode.num_prefill_tokens = 4000
    assert computed_by(prefill, decode, tokens=400) == "prefill"


def test_requests_behind_a_prompt_count_as_those_beside_it():
    assert computed_by(*apart(), tokens=400, behind=4) == "prefill"
    assert computed_by(*apart(), tokens=400, behind=9) == "decode"


def test_slow_transfer_keeps_prompts_local():
    prefill, decode = apart()
    decode.stats = EngineStats(kv_transfer=KvTransferStats(imported_bytes=1_000, import_seconds=0.001))
    assert computed_by(prefill, decode, tokens=400) == "prefill"  # 25 blocks of a millisecond
    decode.stats = EngineStats(kv_transfer=KvTransferStats(imported_bytes=1_000, import_seconds=0.1))
    assert computed_by(prefill, decode, tokens=400) == "decode"


def test_slow_decode_worker_computes_less():
    prefill, decode = apart()
    decode.num_sequences, decode.num_prefill_tokens = 0, 0
    assert computed_by(prefill, decode, tokens=400) == "decode"
    for tokens in (100, 200, 400, 800, 1600, 3200):
        decode.observe_prefill(3 * (STEP + TOKEN * tokens), tokens)
    assert computed_by(prefill, decode, tokens=400) == "prefill"


@pytest.mark.parametrize("measured, now", [(False, 0.0), (True, 1000.0)])
def test_without_recent_measurements_the_length_decides(measured: bool, now: float):
    workers = apart(measured=measured)
    assert computed_by(*workers, tokens=UNMEASURED_REMOTE_PREFILL - 1, now=now) == "decode"
    assert computed_by(*workers, tokens=UNMEASURED_REMOTE_PREFILL, now=now) == "prefill"
    workers[1].num_sequences = 0
    assert computed_by(*workers, tokens=UNMEASURED_REMOTE_PREFILL, now=now) == "prefill"


def test_given_number_replaces_measured_times():
    prefill, decode = apart()
    prefill.num_prefill_tokens = 100_000
    assert Router(64).choose([job(64)], [prefill, decode], 0.0).prefiller is prefill
    assert Router(65).choose([job(64)], [prefill, decode], 0.0).prefiller is None
