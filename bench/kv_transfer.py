"""Bytes per second of KV transfers between two processes, against a plain copy of as many bytes.

One process owns a KV cache and its KV server, the other one fetches blocks from it: through shared memory, and over a
local and a TCP connection. "same pages" is a copy between two caches in one process, whose pages are small if
the system has no huge pages for shared memory (transparent_hugepage/shmem_enabled). Each figure is the
best of several rounds, because other processes only slow a copy.

usage: python bench/kv_transfer.py [--megabytes 256] [--rounds 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
from smoke import parse_arguments

from neso.engine.kv_transfer.exports import ExportTable
from neso.engine.kv_transfer.fetch import Fetch, Fetcher, Prefix
from neso.engine.kv_transfer.format import KvFormat, prefix_digest
from neso.engine.kv_transfer.server import KvServer
from neso.engine.runners.shared_cache import CacheShape, SharedCache

BLOCK = 16
LAYERS, LAYER_BYTES = 24, 2 * 2 * 64 * BLOCK * 2  # Qwen2.5 0.5B in bfloat16: 12 KiB per token
ADDRESSES = {"ipc": None, "tcp": "127.0.0.1"}


def cache_format() -> KvFormat:
    return KvFormat(
        model="bench",
        layout="native",
        dtype="bfloat16",
        block_size=BLOCK,
        num_parts=LAYERS,
        part_bytes=LAYER_BYTES,
    )


def serve(num_blocks: int, rounds: int, connection: Connection) -> None:
    """Own a cache whose blocks are all exported, until the other process closes the connection."""
    cache = SharedCache.create(CacheShape(LAYERS, num_blocks, LAYER_BYTES))
    cache.blocks[:] = np.random.default_rng(0).integers(0, 256, LAYER_BYTES, np.uint8)
    servers = []
    for name, host in ADDRESSES.items():
        table = ExportTable()
        for number in range(2 * rounds):
            export = table.begin(f"{number}")
            export.num_tokens = num_blocks * BLOCK
            export.digest = prefix_digest((), [0] * (num_blocks * BLOCK))
            table.publish(export, list(range(num_blocks)), cache.epochs.tolist())
        servers.append(KvServer(cache, cache_format(), table, host))
        connection.send((name, servers[-1].address))
    connection.recv()
    for server in servers:
        server.close()


def fetch(fetcher: Fetcher, num_blocks: int, address: str, number: int) -> tuple[float, float]:
    """Fetch all blocks; returns the seconds of the whole transfer, and of the copies in it."""
    tokens = [0] * (num_blocks * BLOCK)
    wanted = Fetch(
        address, f"{number}", Prefix((), tokens), 0, list(range(num_blocks)), time.monotonic() + 120
    )
    started = time.perf_counter()
    thread = threading.Thread(target=fetcher.run, args=(wanted,))
    thread.start()
    wanted.done.wait()  # the release of the lease comes after it
    seconds = time.perf_counter() - started
    thread.join()
    assert wanted.num_blocks == num_blocks, wanted.error
    return seconds, wanted.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="size of a transfer in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, megabytes=8, rounds=1)
    num_blocks = max(1, arguments.megabytes * 2**20 // (LAYERS * LAYER_BYTES))
    num_bytes = num_blocks * LAYERS * LAYER_BYTES
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(num_blocks, arguments.rounds, theirs))
    process.start()
    addresses = dict(ours.recv() for _ in ADDRESSES)
    own = SharedCache.create(CacheShape(LAYERS, num_blocks, LAYER_BYTES))
    another = SharedCache.create(own.shape)
    own.blocks[:] = another.blocks[:] = 1  # the system allocates the memory
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    local, remote = (Fetcher(own, cache_format(), allow_shared_memory=shared) for shared in (True, False))
    ways = {
        "shared memory": (local, "ipc", 0),
        "ipc messages": (remote, "ipc", arguments.rounds),
        "TCP messages": (remote, "tcp", 0),
    }
    plain = {"memcpy": (target, source), "same pages": (own.blocks, another.blocks)}
    copies: dict[str, list[float]] = {name: [] for name in plain}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(arguments.rounds):
        for name, (to, origin) in plain.items():
            started = time.perf_counter()
            to[:] = origin
            copies[name].append(time.perf_counter() - started)
        for name, (fetcher, kind, first) in ways.items():
            times[name].append(fetch(fetcher, num_blocks, addresses[kind], first + number))
    ours.send("end")
    process.join()
    copy = min(copies["memcpy"])
    print(f"{num_bytes / 2**20:.0f} MiB in {num_blocks} blocks of {LAYERS} x {LAYER_BYTES} bytes")
    for name, values in copies.items():
        print(f"{name:14} {num_bytes / min(values) / 1e9:6.2f} GB/s {min(values) * 1e3:8.2f} ms")
    for name, pairs in times.items():
        whole, copied = (min(column) for column in zip(*pairs, strict=True))
        print(
            f"{name:14} {num_bytes / copied / 1e9:6.2f} GB/s {copied * 1e3:8.2f} ms, {copy / copied:.0%} of memcpy; "
            f"with messages {whole * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    main()
