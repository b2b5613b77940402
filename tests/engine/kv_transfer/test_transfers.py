"""Exports and imports between two engines in one process, on the fake runner, which notices any wrong block."""

from __future__ import annotations

import threading
import uuid

import msgspec
import pytest
import zmq
from eventually import wait_until
from fake_engine import expected_tokens, make_core, make_request
from transfer_engines import BLOCK, TransferEngine, needs_nixl

from neso.engine.core.attention_window import AttentionWindow
from neso.engine.core.request import KvExport, KvImport
from neso.engine.core.stats import FallbackReason
from neso.engine.kv_transfer import connection as connection_module
from neso.engine.kv_transfer import nixl as nixl_module
from neso.engine.kv_transfer import readers as readers_module
from neso.engine.kv_transfer.nixl import NixlAgent, NixlError, NixlRead
from neso.engine.kv_transfer.readers import MessageReader, NixlReader, SharedMemoryReader
from neso.generation import FinishReason

PROMPT = list(range(1, 23))  # 5 full blocks and 2 tokens


@pytest.fixture
def engine():
    """`engine(**options)` creates an engine."""
    made: list[TransferEngine] = []

    def make(**options) -> TransferEngine:
        made.append(TransferEngine(**options))
        return made[-1]

    yield make
    for one in made:
        one.core.close()


@pytest.fixture(params=["shm", "messages", "TCP", pytest.param("nixl", marks=needs_nixl)])
def pair(engine, request):
    """A prefill and a decode engine."""
    if request.param == "TCP":
        return engine(host="127.0.0.1"), engine(via="messages")
    return engine(via=request.param), engine(via=request.param)


def assert_imported(
    decode: TransferEngine, prompt: list[int], num_tokens: int, name: str = "import t"
) -> None:
    outputs = decode.run_until_finished(name)
    assert decode.tokens(name) == expected_tokens(prompt, 8)
    assert outputs[0].imported_tokens == num_tokens
    assert outputs[0].import_error == ""


def assert_fell_back(
    decode: TransferEngine,
    error: str,
    prompt: list[int] = PROMPT,
    name: str = "import t",
    *,
    reason: FallbackReason = "refused",
) -> None:
    outputs = decode.run_until_finished(name)
    assert decode.tokens(name) == expected_tokens(prompt, 8)
    assert error in outputs[0].import_error
    assert decode.stats.fallbacks_by_reason == {reason: 1}
    decode.wait_until_empty()


def test_import_of_a_complete_export(pair):
    prefill, decode = pair
    output = prefill.complete_export(PROMPT)
    assert output.finish_reason is FinishReason.LENGTH
    assert (output.exported_tokens, output.token_ids) == (20, [])
    assert prefill.num_used == 5 and prefill.stats.leases == 1
    decode.import_from(prefill, PROMPT)
    assert_imported(decode, PROMPT, 20)
    assert decode.core.stats().prefix_hit_tokens == 0
    assert decode.outputs["import t"][0].cached_tokens == 0
    # The importing engine releases the lease.
    prefill.wait_until_empty()
    decode.wait_until_empty()
    assert prefill.stats.expired_leases == 0
    assert decode.stats.imports == 1 and decode.stats.imported_blocks == 5


def test_import_follows_the_prefill_chunk_by_chunk(pair, engine):
    prefill, decode = pair
    config = prefill.core.scheduler.config
    prefill.core.scheduler.config = msgspec.structs.replace(config, max_prefill_chunk=BLOCK + 1)
    prefill.export(PROMPT)
    decode.import_from(prefill, PROMPT)
    decode.step()
    (one,) = decode.transfer._imports
    for num_blocks in (1, 2, 3, 5):  # after 5, 10, 15 and 20 tokens
        prefill.step()
        wait_until(lambda num_blocks=num_blocks: one.fetch.num_blocks == num_blocks)
    assert_imported(decode, PROMPT, 20)
    prefill.wait_until_empty()


def test_import_before_the_export_is_known(pair):
    prefill, decode = pair
    decode.import_from(prefill, PROMPT)
    decode.step()
    prefill.complete_export(PROMPT)
    assert_imported(decode, PROMPT, 20)


def test_only_missing_blocks_are_fetched(pair):
    prefill, decode = pair
    decode.add(make_request("first", PROMPT[:10]))
    decode.run_until_finished("first")
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT)
    assert_imported(decode, PROMPT, 12)
    assert decode.outputs["import t"][0].cached_tokens == 8
    assert decode.stats.imported_blocks == 3


def test_a_cached_prompt_needs_no_transfer(pair):
    prefill, decode = pair
    decode.add(make_request("first", PROMPT))
    decode.run_until_finished("first")
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT)
    assert_imported(decode, PROMPT, 0)
    prefill.wait_until_empty()
    assert decode.stats.imported_blocks == 0


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1])
def test_short_prompts(pair, length):
    prefill, decode = pair
    output = prefill.complete_export(PROMPT[:length])
    assert output.exported_tokens == (length - 1) // BLOCK * BLOCK
    decode.import_from(prefill, PROMPT[:length])
    assert_imported(decode, PROMPT[:length], output.exported_tokens)
    prefill.wait_until_empty()


def test_many_transfers_at_a_time(pair):
    prefill, decode = pair
    prompts = {str(i): [i + 1, *PROMPT[: 5 + i]] for i in range(12)}
    for name, prompt in prompts.items():
        prefill.export(prompt, name)
        decode.import_from(prefill, prompt, name)

    def finished() -> bool:
        prefill.step()
        decode.step()
        return all(decode.is_finished(f"import {name}") for name in prompts)

    wait_until(finished)
    for name, prompt in prompts.items():
        assert decode.tokens(f"import {name}") == expected_tokens(prompt, 8)
    assert decode.stats.fallbacks == 0
    prefill.wait_until_empty()
    decode.wait_until_empty()


def test_continued_request_exports_and_imports_its_output(pair):
    prefill, decode = pair
    whole = expected_tokens(PROMPT, 8)
    assert prefill.complete_export(PROMPT, output_token_ids=whole[:5]).exported_tokens == 24
    decode.import_from(prefill, PROMPT, output_token_ids=whole[:5])
    outputs = decode.run_until_finished("import t")
    assert decode.tokens("import t") == whole[5:]
    assert outputs[0].imported_tokens == 24


def test_import_of_a_shorter_export(pair):
    """The decode engine has died after some tokens; the export has only the prompt."""
    prefill, decode = pair
    whole = expected_tokens(PROMPT, 8)
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT, output_token_ids=whole[:5])
    outputs = decode.run_until_finished("import t")
    assert decode.tokens("import t") == whole[5:]
    assert outputs[0].imported_tokens == 20
    decode.wait_until_empty()


def test_export_with_a_sliding_window(engine):
    window = AttentionWindow(6, 2)
    prefill, decode = engine(window=window, max_prefill_chunk=3), engine(window=window, max_prefill_chunk=3)
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT)
    decode.run_until_finished("import t")
    assert decode.tokens("import t") == expected_tokens(PROMPT, 8, window)
    assert decode.outputs["import t"][0].imported_tokens == 20
    prefill.wait_until_empty()
    decode.wait_until_empty()


def test_preempted_import(engine):
    prefill, decode = engine(), engine(num_blocks=12)
    for name in "ab":
        prefill.complete_export([ord(name), *PROMPT[1:]], name)
        decode.import_from(prefill, [ord(name), *PROMPT[1:]], name, max_tokens=14)
    for name in "ab":
        decode.run_until_finished(f"import {name}")
        assert decode.tokens(f"import {name}") == expected_tokens([ord(name), *PROMPT[1:]], 14)
    decode.wait_until_empty()


# -- leases ---------------------------------------------------------------------------------------------------------


def test_lease_expires(engine):
    prefill, decode = engine(), engine()
    prefill.complete_export(PROMPT, lease=0.0)
    prefill.wait_until_empty()
    assert prefill.stats.expired_leases == 1
    decode.import_from(prefill, PROMPT)
    assert_fell_back(decode, "lease has ended", reason="ended")


def test_extended_lease_does_not_delay_others(engine):
    prefill = engine()
    prefill.complete_export(PROMPT, "first", lease=0.2)
    prefill.transfer.extend_lease("first", 600.0)
    prefill.complete_export(PROMPT[::-1], "second", lease=0.2)

    def only_first() -> bool:
        prefill.step()
        return prefill.stats.leases == 1

    wait_until(only_first)
    assert prefill.num_used == 5
    prefill.transfer.release_lease("first")
    prefill.wait_until_empty()
    assert prefill.stats.expired_leases == 1


def test_blocks_of_a_lease_are_not_reused(engine):
    prefill = engine(num_blocks=8)
    prefill.complete_export(PROMPT)
    prefill.export(PROMPT[::-1], "second")
    for _ in range(3):
        prefill.step()
    assert not prefill.is_finished("export second") and prefill.num_used == 5
    prefill.transfer.release_lease("t")
    prefill.run_until_finished("export second")


def test_released_blocks_stay_cached(engine):
    prefill = engine()
    prefill.complete_export(PROMPT)
    prefill.transfer.release_lease("t")
    prefill.wait_until_empty()
    assert prefill.complete_export(PROMPT, "again").cached_tokens == 16


# -- failures -------------------------------------------------------------------------------------------------------


def test_aborted_export(engine):
    prefill, decode = engine(max_prefill_chunk=BLOCK), engine()
    prefill.export(PROMPT)
    prefill.step()
    decode.import_from(prefill, PROMPT)
    decode.step()
    (one,) = decode.transfer._imports
    wait_until(lambda: one.fetch.num_blocks == 1)
    prefill.core.abort("export t")
    prefill.wait_until_empty()
    outputs = decode.run_until_finished("import t")
    assert decode.tokens("import t") == expected_tokens(PROMPT, 8)
    assert "aborted" in outputs[0].import_error
    assert outputs[0].imported_tokens == BLOCK
    decode.wait_until_empty()


def test_preempted_export_continues(engine):
    prefill, decode = engine(max_prefill_chunk=BLOCK, num_blocks=11), engine()
    prompt = list(range(1, 35))
    prefill.export(prompt, priority=5)
    prefill.step()
    prefill.step()
    decode.import_from(prefill, prompt)
    decode.step()
    (one,) = decode.transfer._imports
    wait_until(lambda: one.fetch.num_blocks == 2)
    prefill.add(make_request("urgent", PROMPT[::-1], max_tokens=16, priority=-5))
    prefill.run_until_finished("urgent")
    assert prefill.core.scheduler.num_preemptions
    prefill.run_until_finished("export t")
    assert_imported(decode, prompt, 32)
    prefill.wait_until_empty()


def test_prefill_engine_that_does_not_answer(engine):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        endpoint = f"ipc://@neso-test-{uuid.uuid4().hex}"
        silent.bind(endpoint)
        decode = engine()
        decode.import_from(f"{endpoint}#token", PROMPT, timeout=0.2)
        assert_fell_back(decode, "did not answer in time", reason="timeout")


def test_prefill_engine_that_ends(engine, monkeypatch):
    monkeypatch.setattr(connection_module, "ANSWER_SECONDS", 3.0)
    prefill, decode = engine(max_prefill_chunk=BLOCK), engine()
    prefill.export(PROMPT)
    prefill.step()
    decode.import_from(prefill, PROMPT)
    decode.step()
    (one,) = decode.transfer._imports
    wait_until(lambda: one.fetch.num_blocks == 1)
    prefill.core.close()
    assert decode.run_until_finished("import t")[0].imported_tokens == BLOCK
    assert_fell_back(decode, "did not answer in time", reason="timeout")


def test_complete_export_outlives_its_engine(engine, monkeypatch):
    """Blocks that were reported can be read when their engine has ended: the memory stays mapped."""
    prefill, decode = engine(), engine()
    prefill.complete_export(PROMPT)
    read = SharedMemoryReader.read

    def read_later(self, blocks, targets):
        prefill.core.close()
        return read(self, blocks, targets)

    monkeypatch.setattr(SharedMemoryReader, "read", read_later)
    decode.import_from(prefill, PROMPT)
    assert_imported(decode, PROMPT, 20)


def test_blocks_that_are_reused_during_the_read_are_discarded(engine, monkeypatch):
    prefill, decode = engine(num_blocks=6), engine()
    prefill.complete_export(PROMPT)
    read = SharedMemoryReader.read

    def read_too_late(self, blocks, targets):
        prefill.transfer.release_lease("t")
        prefill.add(make_request("other", PROMPT[::-1], max_tokens=1))
        prefill.run_until_finished("other")
        return read(self, blocks, targets)

    monkeypatch.setattr(SharedMemoryReader, "read", read_too_late)
    decode.import_from(prefill, PROMPT)
    assert_fell_back(decode, "was released", reason="ended")
    assert decode.stats.imported_blocks == 0


def test_abort_during_the_read_keeps_the_targets_reserved(engine, monkeypatch):
    prefill, decode = engine(), engine()
    prefill.complete_export(PROMPT)
    reading, may_end = threading.Event(), threading.Event()
    read = SharedMemoryReader.read

    def slow_read(self, blocks, targets):
        reading.set()
        assert may_end.wait(60)
        return read(self, blocks, targets)

    monkeypatch.setattr(SharedMemoryReader, "read", slow_read)
    decode.import_from(prefill, PROMPT)
    decode.step()
    assert reading.wait(60)
    decode.core.abort("import t")
    decode.step()
    assert decode.num_used == 5 and decode.core.has_work
    may_end.set()
    decode.wait_until_empty()
    assert "import t" not in decode.outputs
    # The lease is kept, because the request may go to another engine.
    assert prefill.stats.leases == 1


def test_decode_engine_without_free_blocks_waits(engine):
    prefill, decode = engine(), engine(num_blocks=10)
    prefill.complete_export(PROMPT)
    decode.add(make_request("first", PROMPT[::-1], max_tokens=16))
    decode.step()
    decode.import_from(prefill, PROMPT)
    assert_imported(decode, PROMPT, 20)
    assert decode.is_finished("import t") and decode.tokens("first") == expected_tokens(PROMPT[::-1], 16)


def test_import_takes_no_blocks_that_are_promised(engine):
    prefill = engine()
    decode = engine(num_blocks=12, batch_scheduler_policy="guaranteed_no_evict")
    prefill.complete_export(PROMPT)
    decode.add(make_request("first", [5, 6, 7], max_tokens=28))
    decode.step()
    decode.import_from(prefill, PROMPT)
    decode.step()
    assert decode.num_used == 1  # the first may still need 7 of the other 11 blocks, the import needs 5
    assert_imported(decode, PROMPT, 20)
    assert decode.tokens("first") == expected_tokens([5, 6, 7], 28)
    assert decode.core.scheduler.num_preemptions == 0


def test_decode_engine_that_gets_no_free_blocks(engine):
    prefill, decode = engine(), engine(num_blocks=10)
    prefill.complete_export(PROMPT)
    decode.add(make_request("first", PROMPT[::-1], max_tokens=16))
    decode.step()
    decode.import_from(prefill, PROMPT, timeout=0.0)
    assert_fell_back(decode, "no free blocks", reason="no_blocks")


@pytest.mark.parametrize(
    ("address", "error", "reason"),
    [
        ("nowhere", "is not the kv_address", "refused"),
        ("tcp://#x", "cannot connect", "disconnected"),
        ("wrong token", "the token is wrong", "refused"),
    ],
)
def test_wrong_addresses(engine, address, error, reason):
    prefill, decode = engine(), engine()
    if address == "wrong token":
        address = prefill.address.partition("#")[0] + "#guess"
    decode.import_from(address, PROMPT)
    assert_fell_back(decode, error, reason=reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model": "another"}, "different models"),
        ({"block_size": 8}, "block_size is 4 here and 8 there"),
        ({"dtype": "float32"}, "dtype is int64 here and float32 there"),
    ],
)
def test_different_caches_are_refused(engine, options, reason):
    prefill, decode = engine(**options), engine()
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT)
    assert_fell_back(decode, reason)


def test_other_tokens_are_refused(engine):
    prefill, decode = engine(), engine()
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT[::-1])
    assert_fell_back(decode, "other tokens", PROMPT[::-1])
    assert decode.stats.imported_blocks == 0


def test_another_salt_is_refused(engine):
    prefill, decode = engine(), engine()
    prefill.complete_export(PROMPT, cache_identity=("a",))
    decode.import_from(prefill, PROMPT, cache_identity=("b",))
    assert_fell_back(decode, "other tokens")


def test_invalid_messages_do_not_disturb_the_server(engine):
    prefill, decode = engine(), engine()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(prefill.address.partition("#")[0])
        for message in (b"", b"\xc1", b"\x81\xa4type", b"x" * 10_000):
            socket.send(message)
            assert b"refused" in socket.recv()
        socket.send_multipart([b"", b""])
        assert b"refused" in socket.recv()
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT)
    assert_imported(decode, PROMPT, 20)


# -- the choice of a way ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exporter", "importer", "same_host", "expected"),
    [
        ("auto", "auto", True, "SharedMemoryReader"),
        pytest.param("nixl", "nixl", True, "NixlReader", marks=needs_nixl),
        pytest.param("nixl", "nixl", False, "NixlReader", marks=needs_nixl),
        ("auto", "auto", False, "MessageReader"),
        ("auto", "messages", True, "MessageReader"),
        pytest.param("nixl", "auto", False, "MessageReader", marks=needs_nixl),
    ],
)
def test_way_is_chosen_by_the_handshake(engine, monkeypatch, exporter, importer, same_host, expected):
    prefill, decode = engine(via=exporter), engine(via=importer)
    if not same_host:
        monkeypatch.setattr(readers_module, "host_id", lambda: "another host")
    opened = []
    reader = getattr(readers_module, expected)
    read = reader.read
    monkeypatch.setattr(reader, "read", lambda self, *blocks: opened.append(self) or read(self, *blocks))
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT)
    assert_imported(decode, PROMPT, 20)
    assert opened


@needs_nixl
def test_engines_with_a_host_have_nixl(engine, monkeypatch):
    prefill, decode = engine(host="127.0.0.1"), engine(host="127.0.0.1")
    monkeypatch.setattr(readers_module, "host_id", lambda: "another host")
    monkeypatch.delattr(MessageReader, "read")
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT)
    assert_imported(decode, PROMPT, 20)


@pytest.mark.parametrize(
    ("via", "reason"),
    [
        ("shm", "kv_transfer_via=shm, but the memory of the other engine cannot be mapped"),
        pytest.param("nixl", "kv_transfer_via=nixl, but the other engine has no NIXL", marks=needs_nixl),
    ],
)
def test_a_forced_way_that_cannot_be_had_is_refused(engine, monkeypatch, via, reason):
    prefill, decode = engine(), engine(via=via)
    monkeypatch.setattr(readers_module, "host_id", lambda: "another host")
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT)
    assert_fell_back(decode, reason)


def test_without_nixl(engine, monkeypatch):
    monkeypatch.setattr(nixl_module, "_MODULES", ("not_installed",))
    with pytest.raises(NixlError, match="pip install 'neso-server\\[nixl\\]'"):
        engine(via="nixl")
    engine(host="127.0.0.1")  # uses messages


@needs_nixl
@pytest.mark.parametrize("ending", ["abort", "timeout", "close"])
def test_targets_stay_reserved_while_nixl_writes(engine, monkeypatch, ending):
    prefill, decode = engine(via="nixl"), engine(via="nixl")
    prefill.complete_export(PROMPT)
    reading, may_end = threading.Event(), threading.Event()
    has_ended, read = NixlRead.has_ended, NixlAgent.read

    def read_with_timeout(self, *blocks):
        if ending == "timeout":
            monkeypatch.setattr(connection_module, "ANSWER_SECONDS", 0.2)
        return read(self, *blocks)

    def slow(self):
        reading.set()
        return may_end.is_set() and has_ended(self)

    monkeypatch.setattr(NixlRead, "has_ended", slow)
    monkeypatch.setattr(NixlAgent, "read", read_with_timeout)
    decode.import_from(prefill, PROMPT)
    decode.step()
    assert reading.wait(60)
    if ending == "close":
        decode.core.close()  # does not wait for the read
        return
    if ending == "abort":
        decode.core.abort("import t")
        wait_until(lambda: decode.step() or not decode.transfer._imports)
    else:  # the request goes on without the blocks
        outputs = decode.run_until_finished("import t")
        assert "did not answer in time" in outputs[0].import_error
        assert decode.tokens("import t") == expected_tokens(PROMPT, 8)
    assert decode.num_used == 5
    may_end.set()
    decode.wait_until_empty()


# -- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["kv_export", "kv_import"])
def test_engine_without_transfers_refuses(field):
    core = make_core()
    value = KvExport("t") if field == "kv_export" else KvImport("ipc://@x#y", "t")
    (output,) = core.add(make_request("r", PROMPT, **{field: value}))
    assert output.finish_reason is FinishReason.ERROR and output.error_field == field
    assert "kv_transfer" in output.error


def test_transfer_id_in_use(engine):
    prefill = engine()
    prefill.complete_export(PROMPT)
    prefill.add(make_request("again", PROMPT).prefill_only(KvExport("t")))
    assert "in use" in prefill.outputs["again"][0].error
    assert prefill.stats.leases == 1


def test_export_of_several_sequences(engine):
    prefill = engine()
    prefill.add(make_request("r", PROMPT, n=2, kv_export=KvExport("t")))
    assert "prefill_only" in prefill.outputs["r"][0].error
    prefill.add(make_request("r2", PROMPT, n=2).prefill_only(KvExport("t")))
    assert prefill.run_until_finished("r2")[-1].exported_tokens == 20


def test_export_longer_than_the_cache(engine):
    prefill = engine(num_blocks=4, window=AttentionWindow(4), max_prefill_chunk=4)
    prefill.add(make_request("r", PROMPT).prefill_only(KvExport("t")))
    assert "exceed the KV cache" in prefill.outputs["r"][0].error
    prefill.wait_until_empty()


def test_prompt_log_probabilities_ignore_the_transfer(engine):
    prefill, decode = engine(), engine()
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT, prompt_logprobs=1)
    outputs = decode.run_until_finished("import t")
    assert sum(len(output.prompt_logprobs) for output in outputs) == len(PROMPT) - 1
    assert decode.stats.imported_blocks == 0
    prefill.wait_until_empty()


def test_blocks_are_read_in_parts(pair, monkeypatch):
    for reader in (SharedMemoryReader, MessageReader, NixlReader):
        monkeypatch.setattr(reader, "max_bytes", 2 * 8 * BLOCK)
    prefill, decode = pair
    prefill.complete_export(PROMPT)
    decode.import_from(prefill, PROMPT)
    assert_imported(decode, PROMPT, 20)
