"""The rate limiter without models: grants, resources and order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.server.errors import InvalidArgument
from neso.server.options import ResourceLimit
from neso.server.rate_limiter.limiter import LimitedInstances, RateLimiter


def group(
    resources: str = "", *, gpu: int | None = None, priority: int = 0, count: int = 1, passive: bool = False
) -> str:
    """Return an instance group; resources are written like "R:2 *G:1", * for global ones."""
    entries = [word.split(":") for word in resources.split()]
    text = " ".join(
        f'resources {{ name: "{name.lstrip("*")}" count: {number} global: {str(name.startswith("*")).lower()} }}'
        for name, number in entries
    )
    kind = "KIND_CPU" if gpu is None else f"KIND_GPU gpus: {gpu}"
    return (
        f"instance_group {{ kind: {kind} count: {count} passive: {str(passive).lower()} "
        f"rate_limiter {{ {text} priority: {priority} }} }}"
    )


def config(*groups: str) -> Any:
    return text_format.Parse('name: "m" ' + " ".join(groups), ModelConfig())


def register(limiter: RateLimiter, *groups: str) -> LimitedInstances:
    limited = limiter.register(config(*groups))
    assert limited is not None
    return limited


def limits(text: str) -> tuple[ResourceLimit, ...]:
    return tuple(ResourceLimit.parse(word) for word in text.split())


@pytest.mark.parametrize(
    ("text", "expected"), [("R:3", ResourceLimit("R", 3)), ("R1:0:2", ResourceLimit("R1", 0, 2))]
)
def test_limits_are_read(text: str, expected: ResourceLimit) -> None:
    assert ResourceLimit.parse(text) == expected


@pytest.mark.parametrize("text", ["", "R", "R:", "R:x", "R:-1", ":1", "R:1:2:3", "R:1:", "R:1:gpu", "R:1.5"])
def test_invalid_limits_are_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match="option format is '<resource_name>:<count>:<device>'"):
        ResourceLimit.parse(text)


async def test_instances_without_resources_do_not_wait() -> None:
    limiter = RateLimiter()
    assert limiter.register(config(group(count=3))) is None
    mixed = register(limiter, group("R:1"), group())
    assert mixed.acquire(1) and not mixed.acquire(0)


async def test_default_amount_is_the_maximum_need() -> None:
    limiter = RateLimiter()
    small, large = register(limiter, group("R:2", count=3)), register(limiter, group("R:5"))
    assert [small.acquire(number) for number in range(3)] == [False] * 3
    await asyncio.sleep(0)
    assert [small.acquire(number) for number in range(3)] == [True, True, False]  # 4 of 5 are taken
    small.cancel_all()
    assert not large.acquire(0)
    small.release(0)
    small.release(1)
    await asyncio.sleep(0)
    assert large.acquire(0)


@pytest.mark.parametrize(
    ("given", "needs", "amount"),
    [
        ("R:1", group("R:4"), 1),
        ("R:9 S:9", group("T:1"), 0),  # with explicit limits, other resources do not exist
        ("R:9:10", group("R:4"), 0),  # on another device
        ("R:3 R:9:0", group("R:4", gpu=1), 3),
        ("R:3:7", group("*R:4"), 3),
    ],
)
def test_unsatisfiable_needs_are_rejected(given: str, needs: str, amount: int) -> None:
    message = (
        f"is limited to {amount} which will prevent scheduling of one or more model instances, "
        "the minimum required count is"
    )
    with pytest.raises(InvalidArgument, match=message):
        RateLimiter(limits(given)).register(config(needs))


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        ("R:4", group("R:4")),
        ("R:3 R:4:0", group("R:4")),
        ("R:4:7", group("*R:4")),  # the device of a global resource is ignored
        ("S:1", group("R:9", passive=True)),
    ],
)
async def test_satisfiable_needs_are_admitted(given: str, needs: str) -> None:
    RateLimiter(limits(given)).register(config(needs))


async def test_a_resource_is_global_or_of_devices() -> None:
    limiter = RateLimiter()
    first = register(limiter, group("R:1"))
    with pytest.raises(InvalidArgument, match='"R" is present as both global and device-specific resource'):
        limiter.register(config(group("*R:1")))
    first.close()
    register(limiter, group("*R:1"))  # neither the closed model nor the rejected one counts


async def test_resources_are_counted_on_each_device_or_once() -> None:
    limiter = RateLimiter(limits("R:1 G:1"))
    on_devices = register(limiter, group("R:1", gpu=0), group("R:1", gpu=1))
    globally = register(limiter, group("*G:1", gpu=0), group("*G:1", gpu=1))
    for limited in (on_devices, globally):
        limited.acquire(0), limited.acquire(1)
    await asyncio.sleep(0)
    assert [on_devices.acquire(0), on_devices.acquire(1)] == [True, True]
    assert [globally.acquire(0), globally.acquire(1)] == [True, False]


async def test_instances_with_other_resources_overtake() -> None:
    limiter = RateLimiter(limits("R:2 S:1"))
    holder, wants_all, wants_one, elsewhere = (
        register(limiter, group(needs)) for needs in ("R:1", "R:2", "R:1", "S:1")
    )
    holder.acquire(0)
    await asyncio.sleep(0)
    assert holder.acquire(0)
    for limited in (wants_all, wants_one, elsewhere):
        limited.acquire(0)
    await asyncio.sleep(0)
    assert elsewhere.acquire(0)
    assert not wants_one.acquire(0)  # it would fit, but the earlier request has reserved it
    holder.release(0)
    await asyncio.sleep(0)
    assert wants_all.acquire(0) and not wants_one.acquire(0)


async def test_cancel_releases_the_reservation() -> None:
    limiter = RateLimiter(limits("R:2"))
    holder, wants_all, wants_one = (register(limiter, group(needs)) for needs in ("R:1", "R:2", "R:1"))
    granted = []
    wants_one.on_grant = lambda: granted.append(True)
    holder.acquire(0)
    await asyncio.sleep(0)
    assert holder.acquire(0) and not wants_all.acquire(0) and not wants_one.acquire(0)
    wants_all.cancel(0)
    await asyncio.sleep(0)
    assert granted and wants_one.acquire(0)


async def test_unused_grants_are_released() -> None:
    limiter = RateLimiter()
    first, second = register(limiter, group("R:1")), register(limiter, group("R:1"))
    first.acquire(0)
    await asyncio.sleep(0)
    first.cancel_all()
    second.acquire(0)
    await asyncio.sleep(0)
    assert second.acquire(0)


async def test_unload_releases_resources_and_maximum() -> None:
    limiter = RateLimiter()
    large, small = register(limiter, group("R:4")), register(limiter, group("R:1", count=4))
    large.acquire(0)
    await asyncio.sleep(0)
    assert large.acquire(0)
    small.acquire_any()
    large.close()
    await asyncio.sleep(0)
    # The maximum is 1 now, not 4.
    assert small.acquire_any() is not None and small.acquire_any() is None
    large.release(0)  # late: it has nothing to release
    await asyncio.sleep(0)
    assert small.acquire_any() is None


@pytest.mark.parametrize("priorities", [(1, 1), (1, 2), (1, 3), (2, 5), (0, 4)])
async def test_priority_2_executes_half_as_often(priorities: tuple[int, int]) -> None:
    limiter = RateLimiter()
    pair = [register(limiter, group("R:1", priority=priority)) for priority in priorities]
    executions = await compete(limiter, pair, 120)
    first, second = (max(priority, 1) for priority in priorities)
    expected = 120 * second / (first + second)
    assert abs(executions[pair[0]] - expected) <= 2


async def test_idle_instances_do_not_accumulate_turns() -> None:
    limiter = RateLimiter()
    old = register(limiter, group("R:1"))
    await compete(limiter, [old], 1000)
    new = register(limiter, group("R:1"))
    executions = await compete(limiter, [old, new], 20)
    assert executions[old] == executions[new] == 10


async def test_large_needs_do_not_starve() -> None:
    limiter = RateLimiter(limits("R:2"))
    small = [register(limiter, group("R:1")) for _ in range(2)]
    large = register(limiter, group("R:2"))
    executing: list[LimitedInstances] = []
    for number in range(100):  # without a reservation, one of the small ones would always execute
        for limited in small:
            limited.acquire(0) if limited not in executing else None
        await asyncio.sleep(0)
        if large.acquire(0):
            break
        executing += [limited for limited in small if limited not in executing and limited.acquire(0)]
        if len(executing) > 1 or number > 50:
            executing.pop(0).release(0)
    else:
        pytest.fail("it never got its turn")
    assert not executing


async def compete(
    limiter: RateLimiter, models: list[LimitedInstances], rounds: int
) -> Counter[LimitedInstances]:
    """Let all models compete for one execution at a time."""
    executions: Counter[LimitedInstances] = Counter()
    for _ in range(rounds):
        for limited in models:
            limited.acquire(0)
        await asyncio.sleep(0)
        (winner,) = [limited for limited in models if limited.acquire(0)]
        executions[winner] += 1
        winner.release(0)
    return executions


RESOURCES = ("R", "S", "*G")
needs = st.dictionaries(st.sampled_from(RESOURCES), st.integers(1, 4), min_size=1)
groups = st.tuples(needs, st.integers(0, 1), st.integers(0, 3), st.integers(1, 2))


@settings(max_examples=60, deadline=None)
@given(
    models=st.lists(st.lists(groups, min_size=1, max_size=2), min_size=1, max_size=4),
    seed=st.integers(0, 9999),
)
def test_amounts_are_respected_and_all_instances_execute(models: list[Any], seed: int) -> None:
    """Compared with separate accounting of the held resources and of waiting times."""

    async def play() -> None:
        rng = random.Random(seed)
        limiter = RateLimiter(limits("R:4 S:5 G:4"))
        amounts = {"R": 4, "S": 5, "*G": 4}
        # By model: needs and device of each instance.
        books = [
            [(expected, device) for expected, device, _, count in of_model for _ in range(count)]
            for of_model in models
        ]
        instances = [
            register(
                limiter,
                *(
                    group(
                        " ".join(f"{k}:{n}" for k, n in expected.items()), gpu=device, priority=p, count=count
                    )
                    for expected, device, p, count in of_model
                ),
            )
            for of_model in models
        ]
        everybody = [(m, number) for m, of_model in enumerate(books) for number in range(len(of_model))]
        executing: set[tuple[int, int]] = set()
        waited: Counter[tuple[int, int]] = Counter()
        for _ in range(150):
            await asyncio.sleep(0)
            for who in everybody:  # all idle instances always request an execution
                if who not in executing and instances[who[0]].acquire(who[1]):
                    executing.add(who)
                    waited[who] = 0
            held: Counter[tuple[str, int]] = Counter()
            for m, number in executing:
                expected, device = books[m][number]
                for name, count in expected.items():
                    held[name, -1 if name.startswith("*") else device] += count
            assert all(count <= amounts[name] for (name, _), count in held.items())
            for who in everybody:
                if who not in executing:
                    waited[who] += 1
                    # Others execute at most 3 times (the largest priority) before it, for about 3 rounds each.
                    assert waited[who] < 12 * len(everybody) + 20
            for who in [who for who in executing if rng.random() < 0.6]:
                executing.remove(who)
                instances[who[0]].release(who[1])
        for limited in instances:
            limited.close()

    asyncio.run(play())
