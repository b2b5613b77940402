"""Bytes per second of KV transfers between two processes, against a plain copy of as many bytes.

One process owns a KV cache and its KV server, the other one fetches blocks from it: through shared memory, over a
local and a TCP connection, and with NIXL, whose figures are compared with those of a single read of NIXL. "same pages"
is a copy between two caches in one process, whose pages are small if the system has no huge pages for shared memory
(transparent_hugepage/shmem_enabled). Each figure is the best of several rounds, because other processes only slow a
copy.

usage: python bench/kv_transfer.py [--megabytes 256] [--rounds 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
from smoke import parse_arguments

from neso.engine.kv_transfer.exports import ExportTable
from neso.engine.kv_transfer.fetch import Fetch, Fetcher, Prefix
from neso.engine.kv_transfer.format import KvFormat, prefix_digest
from neso.engine.kv_transfer.nixl import NixlAgent, NixlError, NixlMemory
from neso.engine.kv_transfer.server import KvServer
from neso.engine.runners.shared_cache import CacheShape, SharedCache

BLOCK = 16
LAYERS, LAYER_BYTES = 24, 2 * 2 * 64 * BLOCK * 2  # Qwen2.5 0.5B in bfloat16: 12 KiB per token
SERVERS: dict[str, tuple[str | None, str]] = {  # host, and the ways that NIXL may take
    "ipc": (None, ""),
    "tcp": ("127.0.0.1", ""),
    "NIXL": (None, "all"),
    "NIXL TCP": (None, "tcp"),
}


def cache_format() -> KvFormat:
    return KvFormat(
        model="bench",
        layout="native",
        dtype="bfloat16",
        block_size=BLOCK,
        num_parts=LAYERS,
        part_bytes=LAYER_BYTES,
    )


def open_agent(cache: SharedCache, name: str, transports: str) -> NixlAgent | None:
    """Return an agent of NIXL that uses these transports of UCX; None if there are none, or NIXL is not installed."""
    os.environ["UCX_TLS"] = transports
    try:
        return NixlAgent(name, cache) if transports else None
    except NixlError as error:
        print(error)
        return None


def serve(num_blocks: int, rounds: int, connection: Connection) -> None:
    """Own a cache whose blocks are all exported, until the other process closes the connection."""
    cache = SharedCache.create(CacheShape(LAYERS, num_blocks, LAYER_BYTES))
    cache.blocks[:] = np.random.default_rng(0).integers(0, 256, LAYER_BYTES, np.uint8)
    servers, agents = [], []
    for name, (host, transports) in SERVERS.items():
        table = ExportTable()
        for number in range(2 * rounds):
            export = table.begin(f"{number}")
            export.num_tokens = num_blocks * BLOCK
            export.digest = prefix_digest((), [0] * (num_blocks * BLOCK))
            table.publish(export, list(range(num_blocks)), cache.epochs.tolist())
        agents.append(open_agent(cache, f"exporter {name}", transports))
        memory = None if agents[-1] is None else agents[-1].memory
        servers.append(KvServer(cache, cache_format(), table, host, memory))
        connection.send((name, servers[-1].address, memory))
    connection.recv()
    for server in servers:
        server.close()


def read_directly(agent: NixlAgent, memory: NixlMemory, own: SharedCache, num_blocks: int) -> float:
    """Read all blocks at once; returns the seconds."""
    peer = agent.connect("direct", memory)
    blocks = list(range(num_blocks))
    started = time.perf_counter()
    reading = agent.read(peer, blocks, blocks, own)
    while not reading.has_ended():
        time.sleep(0.0002)
    seconds = time.perf_counter() - started
    agent.disconnect(peer)
    return seconds


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
    # A daemon, so that it ends with this process if a transfer fails.
    process = context.Process(target=serve, args=(num_blocks, arguments.rounds, theirs), daemon=True)
    process.start()
    theirs.close()  # so that `recv` fails if the other process does
    sent = [ours.recv() for _ in SERVERS]
    addresses = {name: address for name, address, _ in sent}
    memories = {name: memory for name, _, memory in sent if memory is not None}
    own = SharedCache.create(CacheShape(LAYERS, num_blocks, LAYER_BYTES))
    another = SharedCache.create(own.shape)
    own.blocks[:] = another.blocks[:] = 1  # the system allocates the memory
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    agents = {name: open_agent(own, f"importer {name}", SERVERS[name][1]) for name in memories}
    shared, messages = Fetcher(own, cache_format(), "shm"), Fetcher(own, cache_format(), "messages")
    ways = {
        "shared memory": (shared, "ipc", 0),
        "ipc messages": (messages, "ipc", arguments.rounds),
        "TCP messages": (messages, "tcp", 0),
        **{name: (Fetcher(own, cache_format(), "nixl", agent), name, 0) for name, agent in agents.items()},
    }
    plain = {"memcpy": (target, source), "same pages": (own.blocks, another.blocks)}
    copies: dict[str, list[float]] = {name: [] for name in plain}
    direct: dict[str, list[float]] = {name: [] for name in memories}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(arguments.rounds):
        for name, (to, origin) in plain.items():
            started = time.perf_counter()
            to[:] = origin
            copies[name].append(time.perf_counter() - started)
        for name, memory in memories.items():
            agent = agents[name]
            assert agent is not None
            direct[name].append(read_directly(agent, memory, own, num_blocks))
        for name, (fetcher, kind, first) in ways.items():
            times[name].append(fetch(fetcher, num_blocks, addresses[kind], first + number))
    ours.send("end")
    process.join()
    print(f"{num_bytes / 2**20:.0f} MiB in {num_blocks} blocks of {LAYERS} x {LAYER_BYTES} bytes")
    best = {f"{name}, one read": min(values) for name, values in direct.items()}
    best |= {name: min(values) for name, values in copies.items()}
    for name, seconds in best.items():
        print(f"{name:18} {num_bytes / seconds / 1e9:6.2f} GB/s {seconds * 1e3:8.2f} ms")
    for name, pairs in times.items():
        whole, copied = (min(column) for column in zip(*pairs, strict=True))
        base = f"{name}, one read" if name in direct else "memcpy"
        print(
            f"{name:18} {num_bytes / copied / 1e9:6.2f} GB/s {copied * 1e3:8.2f} ms, {best[base] / copied:.0%} of "
            f"{base}; with messages {whole * 1e3:.2f} ms, {best[base] / whole:.0%}"
        )


if __name__ == "__main__":
    main()
