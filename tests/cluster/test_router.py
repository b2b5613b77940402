"""`Router`: which worker gets a request, and how long a request waits for a busy worker."""

from __future__ import annotations

from neso.cluster.messages import Credits
from neso.cluster.router import MAX_DELAY, Choice, Router
from neso.cluster.work_queue import Job, WorkerState
from neso.engine.client.prefix_estimate import PrefixKeys
from neso.engine.core.request import EngineRequest
from neso.engine.ipc.messages import EngineInfo
from neso.generation import LoraRequest, SamplingParams

BLOCK = 16
INFO = EngineInfo("native", 4096, 8, 384, 1024, BLOCK, 2**20, 0.1)
FULL, FREE = Credits(), Credits(8, 1000, 1000)


def worker(name: str, credits: Credits = FREE) -> WorkerState:
    state = WorkerState(name, INFO)
    state.update(credits)
    state.seconds_per_token = 0.001
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
    state.prefixes.add(request.keys.keys)
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
    other.seconds_per_token = 0.0  # nothing is known
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
