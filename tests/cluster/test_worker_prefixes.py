"""`WorkerPrefixes` and the messages of engines: the front end knows exactly which blocks a worker holds."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from neso.cluster.work_queue import Job
from neso.cluster.worker_prefixes import WorkerPrefixes
from neso.engine.client.prefix_estimate import PrefixEstimate, PrefixKeys
from neso.engine.core.kv_manager import KVCacheManager
from neso.engine.core.prefix_keys import AdapterVersion, BlockChanges, next_key, root_key
from neso.engine.core.request import EngineRequest, PromptImage
from neso.engine.core.sequence import Sequence
from neso.generation import LoraRequest, SamplingParams

SIZE = 2


def keys_of(tokens: list[int], **values: Any) -> PrefixKeys:
    return PrefixKeys(make_request(tokens, **values), SIZE)


def make_request(tokens: list[int], **values: Any) -> EngineRequest:
    return EngineRequest(
        request_id="a", prompt_token_ids=tokens, sampling=SamplingParams(), max_tokens=4, **values
    )


def fresh(max_blocks: int = 100) -> WorkerPrefixes:
    return WorkerPrefixes("w", PrefixEstimate(8), max_blocks)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


class CacheMachine(RuleBasedStateMachine):
    """An engine's cache of few blocks with a host tier; messages are lost, and the engine is started again."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Sequence] = []
        self.count = 0
        self.prefixes = fresh()
        self.start()

    def start(self) -> None:
        self.kv = KVCacheManager(8, SIZE, num_host_blocks=2)
        self.running.clear()
        self.deliver(self.kv.prefix_cache.all_keys())

    def deliver(self, changes: BlockChanges | None) -> None:
        if changes is not None and self.prefixes.apply(changes):
            self.prefixes.asked()
            assert not self.prefixes.apply(self.kv.prefix_cache.all_keys())

    @rule(prompt=PROMPTS, salt=st.sampled_from("ab"))
    def compute(self, prompt: list[int], salt: str) -> None:
        sequence = Sequence(id=1, request=make_request(prompt), arrival=1, token_ids=prompt)
        sequence.cache_identity = (salt,)
        self.kv.attach_prefix(sequence)
        if self.kv.try_grow(sequence, len(prompt)) is None:
            self.kv.free(sequence)
            return
        sequence.num_computed_tokens = len(prompt)
        self.kv.register_full_blocks(sequence)
        self.running.append(sequence)

    @rule()
    def end(self) -> None:
        if self.running:
            self.kv.free(self.running.pop(0))

    @rule()
    def report(self) -> None:
        self.deliver(self.kv.prefix_cache.take_changes())

    @rule()
    def lose_a_report(self) -> None:
        self.kv.prefix_cache.take_changes()

    @rule()
    def restart(self) -> None:
        self.prefixes = fresh()
        self.start()

    @rule(prompt=PROMPTS, salt=st.sampled_from("ab"))
    def compare(self, prompt: list[int], salt: str) -> None:
        """After the next report, the front end knows the cache, whatever was lost before."""
        unknown = Sequence(id=2, request=make_request([7] * SIZE), arrival=2, token_ids=[7] * SIZE)
        self.count += 1
        unknown.cache_identity = (f"new {self.count}",)
        self.kv.attach_prefix(unknown)
        if self.kv.try_grow(unknown, SIZE) is not None:
            unknown.num_computed_tokens = SIZE
            self.kv.register_full_blocks(unknown)  # so that there is a report
            self.kv.free(unknown)
            self.report()
            self.check()
            found = self.kv.prefix_cache.match((salt,), [*prompt, 9])
            assert self.prefixes.match(keys_of(prompt, cache_identity=(salt,))) >= len(found)

    def check(self) -> None:
        cache = self.kv.prefix_cache
        nodes = [cached.node for cached in cache._cached.values()] + list(cache.host.nodes())
        assert self.prefixes._held == {node.key for node in nodes}

    def teardown(self) -> None:
        for sequence in self.running:
            self.kv.free(sequence)
        self.kv.check_integrity([])


TestCacheMachine = CacheMachine.TestCase


def test_keys_are_the_same_in_every_process():
    assert next_key(root_key(("salt",)), [1, 2]) == 5561931918068135338
    assert keys_of([1, 2], cache_identity=("salt",)).keys == [5561931918068135338]


def test_engine_and_front_end_have_the_same_keys_for_adapters():
    in_engine = root_key(("", AdapterVersion("x", 7)))
    assert keys_of([1, 2], cache_identity=("",), lora=LoraRequest(name="x")).keys == [
        next_key(in_engine, (1, 2))
    ]


def test_blocks_of_requests_on_their_way_count():
    prefixes = fresh()
    prefixes.apply(BlockChanges(1, [], complete=True))
    request = Job(make_request([1, 2, 3, 4]), keys_of([1, 2, 3, 4]), 0.0)
    prefixes.add(request)
    assert prefixes.match(keys_of([1, 2, 3, 4, 5, 6])) == 2
    prefixes.remove(request)
    assert prefixes.match(keys_of([1, 2, 3, 4])) == 0


def test_estimate_is_used_until_the_worker_has_reported():
    estimate, keys = PrefixEstimate(8), keys_of([1, 2, 3, 4])
    prefixes = WorkerPrefixes("w", estimate, 100)
    estimate.add(keys.keys)
    assert (prefixes.known, prefixes.match(keys)) == (False, 2)
    prefixes.apply(BlockChanges(1, keys.keys[:1], complete=True))
    assert (prefixes.known, prefixes.match(keys)) == (True, 1)


def test_estimate_is_used_for_content_that_engines_identify_otherwise():
    estimate = PrefixEstimate(8)
    image = keys_of([1, 2], images=[PromptImage(b"0", b"pixels", (1, 2, 1))])
    prefixes = WorkerPrefixes("w", estimate, 100)
    prefixes.apply(BlockChanges(1, [], complete=True))
    estimate.add(image.keys)
    assert prefixes.match(image) == 1


def test_worker_with_too_many_blocks_is_estimated():
    estimate, keys = PrefixEstimate(8), keys_of([1, 2, 3, 4])
    prefixes = WorkerPrefixes("w", estimate, 1)
    assert not prefixes.apply(BlockChanges(1, keys.keys, complete=True))
    assert not prefixes.known
    assert not prefixes.apply(BlockChanges(2, [])), "it is not asked again"


def test_missed_message_is_asked_for_once():
    prefixes = fresh()
    prefixes.apply(BlockChanges(1, [5], complete=True))
    assert prefixes.apply(BlockChanges(3, [6]))
    prefixes.asked()
    assert not prefixes.apply(BlockChanges(4, [7]))
    prefixes.apply(BlockChanges(5, [5, 6, 7], complete=True))
    assert not prefixes.apply(BlockChanges(6, [], [5]))
    assert prefixes._held == {6, 7}
