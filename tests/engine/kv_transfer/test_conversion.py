"""Blocks are converted between caches with different layouts, dtypes and block sizes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from eventually import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from request_mix import Files, Mixed, with_prompt
from transfer_engines import needs_nixl

from neso.engine.core.request import KvExport, KvImport
from neso.engine.kv_transfer.conversion import BlockView, Converter, expected_bytes, mismatch, token_places
from neso.engine.kv_transfer.format import KvFormat
from neso.engine.runners.shared_cache import CacheShape, SharedCache

LAYERS, HEADS, DIM = 2, 3, 20


def make_format(layout: str, dtype: str, block_size: int, **others: Any) -> KvFormat:
    parts = LAYERS * {"native": 1, "heads": 2 * HEADS, "tokens": 2}[layout]
    made = KvFormat(
        model="m",
        layout=layout,
        dtype=dtype,
        block_size=block_size,
        num_parts=parts,
        part_bytes=0,
        num_layers=LAYERS,
        kv_heads=HEADS,
        head_dim=DIM,
    )
    return msgspec.structs.replace(made, part_bytes=expected_bytes(made) // parts, **others)


def open_cache(block_format: KvFormat, num_blocks: int) -> SharedCache:
    return SharedCache.create(CacheShape(block_format.num_parts, num_blocks, block_format.part_bytes))


formats = st.builds(
    make_format,
    st.sampled_from(["native", "heads", "tokens"]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(1, 40),
)


@settings(max_examples=60, deadline=None)
@given(formats, formats, st.integers(0, 2), st.integers(1, 60), st.randoms(use_true_random=False))
def test_tokens_come_to_their_positions(own: KvFormat, other: KvFormat, held: int, length: int, rng: Any):
    """However the blocks of a sequence are cut into reads, each token's values are at its position afterwards."""
    values = np.random.default_rng(0).normal(size=(LAYERS, 2, HEADS, length, DIM)).astype(np.float32)
    num_sources = -(-length // other.block_size)
    source = open_cache(other, num_sources)
    at = np.arange(length)
    BlockView(source, other).write(at // other.block_size, at % other.block_size, values)
    first = held * own.block_size
    count = max(1, -(-length // own.block_size))
    target = open_cache(own, count + 3)
    target.blocks[:] = 0xFF  # NaN that another sequence has left
    targets = rng.sample(range(count + 3), count)
    converter = Converter(target, own, other)
    have = first // other.block_size
    while have < num_sources:
        part = rng.randint(1, min(num_sources - have, converter.staging.shape.num_blocks))
        converter.staging.blocks[:, :part] = source.blocks[:, have : have + part]
        converter.write(have, part, first, targets)
        have += part
    wanted = np.arange(first, min(length, first + count * own.block_size))
    places = wanted - first
    blocks = np.array(targets, np.intp)[places // own.block_size]
    found = BlockView(target, own).read(blocks, places % own.block_size)
    dtypes = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    expected = values[:, :, :, wanted].astype(dtypes[other.dtype]).astype(dtypes[own.dtype])
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    used = sorted(set(blocks.tolist()))
    numbers = target.blocks[:, used].view(dtypes[own.dtype]).astype(np.float32)
    assert np.isfinite(numbers).all()


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_places_are_the_positions_in_both_ranges(start: int, count: int, first: int, wanted: int):
    both = set(range(start, start + count)) & set(range(first, first + wanted))
    assert token_places(start, count, first, wanted).tolist() == sorted(both)


@settings(max_examples=30, deadline=None)
@given(formats)
def test_every_value_has_a_place_of_its_own(block_format: KvFormat):
    view = BlockView(open_cache(block_format, 1), block_format)
    places = view._parts * 10**9 + view._elements
    assert len(np.unique(places)) == places.size == 2 * HEADS * block_format.block_size * DIM


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "another"}, "different models"),
        ({"layout": "packed"}, "the layout 'packed' cannot be converted"),
        ({"dtype": "int8"}, "the dtype 'int8' cannot be converted"),
        ({"num_layers": 4}, "num_layers is 2 here and 4 there"),
        ({"kv_heads": 1}, "kv_heads is 3 here and 1 there"),
        ({"head_dim": 16}, "head_dim is 20 here and 16 there"),
        ({"part_bytes": 4}, "a block of the layout 'native' has"),
    ],
)
def test_caches_that_cannot_be_converted_are_refused(change: dict[str, Any], reason: str):
    own = make_format("native", "float32", 16)
    assert mismatch(own, own) == ""
    assert mismatch(own, make_format("heads", "bfloat16", 5)) == ""
    assert reason in mismatch(own, msgspec.structs.replace(own, **change))


SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "larger here": ({"block_size": 4}, {"block_size": 16}),
    "smaller here": ({"block_size": 16}, {"block_size": 4}),
    "no multiple": ({"block_size": 6}, {"block_size": 10}),
    "messages": ({"block_size": 12}, {"block_size": 5, "kv_transfer_via": "messages"}),
    "another runner": ({"runner": "reference", "block_size": 4}, {"block_size": 8}),
    "to another runner": ({"block_size": 4}, {"runner": "reference", "block_size": 3}),
    "native to torch": ({"block_size": 4}, {"runner": "torch", "block_size": 8}),
    "torch to native": ({"runner": "torch", "block_size": 16}, {"block_size": 4}),
    "nixl": (
        {"block_size": 4, "kv_transfer_via": "nixl"},
        {"block_size": 16, "kv_transfer_via": "nixl"},
    ),
}


@pytest.fixture(scope="module")
def files(checkpoint_factory, tmp_path_factory) -> Files:
    same = checkpoint_factory("llama")
    return Files(tmp_path_factory.mktemp("conversions"), same, same)


def transfer(prefill: Mixed, decode: Mixed, name: str, requested: Any) -> list[int]:
    """Let one engine compute the prompt of a request while the other waits for it; return the tokens."""
    request = decode.engine_request(name, requested)
    assert prefill.core.add(request.prefill_only(KvExport(name))) == []
    importing = msgspec.structs.replace(request, kv_import=KvImport(prefill.info.kv_address, name, 60.0))
    outputs = decode.core.add(importing)

    def finished() -> bool:
        prefill.core.step()
        prefill.core.check_integrity()
        outputs.extend(decode.core.step())
        decode.core.check_integrity()
        return bool(outputs) and outputs[-1].finish_reason is not None

    wait_until(finished, 60)
    assert not any(output.error for output in outputs), outputs
    assert outputs[0].import_error == ""
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=needs_nixl) if name == "nixl" else name for name in SIZES]
)
def test_tokens_equal_those_of_one_engine(files, case):
    own: dict[str, Any] = {"runner": "native", "num_blocks": 64, "max_prefill_chunk": 7, "kv_transfer": True}
    prefill, decode = (Mixed(str(files.same), **files.engine_options({**own, **one})) for one in SIZES[case])
    for name, params in {"greedy": {"ignore_eos": True}, "seeded": {"temperature": 0.8, "seed": 5}}.items():
        requested = with_prompt("long", params)
        tokens = transfer(prefill, decode, name, requested)
        assert tokens == files._open_plain("native", False).alone("r", requested).tokens[0]
    stats = decode.core.stats().kv_transfer
    assert stats.imported_blocks > 0 and stats.fallbacks == 0
    for engine in (prefill, decode):
        engine.core.close()


def test_another_dtype_is_converted(files):
    """The keys and values are those of the other engine, rounded; the text need not be that of one engine."""
    own: dict[str, Any] = {"runner": "native", "num_blocks": 64, "kv_transfer": True}
    options = [{"dtype": "float32", "block_size": 8}, {"dtype": "bfloat16", "block_size": 4}]
    prefill, decode = (Mixed(str(files.same), **files.engine_options({**own, **one})) for one in options)
    request = with_prompt("long", {"ignore_eos": True})
    assert len(transfer(prefill, decode, "r", request)) > 0
    assert decode.core.stats().kv_transfer.imported_blocks > 0
    tokens = prefill.engine_request("r", request).prompt_token_ids
    count = (len(tokens) - 1) // 8 * 8
    rows = []
    for engine in (prefill, decode):
        size, kv = engine.info.block_size, engine.core.scheduler.kv
        found = kv.prefix_cache.match(engine.engine_request("r", request).cache_identity, tokens)
        blocks = np.array([cached.block for cached in found], np.intp)
        at = np.arange(count)
        view = BlockView(engine.core.runner.shared_cache, engine.info.kv_format)
        rows.append(view.read(blocks[at // size], at % size))
    assert rows[1].dtype == ml_dtypes.bfloat16 and count >= 8
    np.testing.assert_array_equal(rows[0].astype(ml_dtypes.bfloat16), rows[1])
    for engine in (prefill, decode):
        engine.core.close()
