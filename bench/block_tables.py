"""Host time of packing the block tables of a decode step: arrays of int32, against lists of ints.

usage: python bench/block_tables.py [--rows 16 64 256 1024] [--blocks 32 512] [--repeats 30] [--smoke]
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from smoke import parse_arguments

from neso.engine.core.step import padded_block_tables


def pack_lists(tables: list[list[int]]) -> npt.NDArray[np.int32]:
    padded = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def best_microseconds(*runs: Callable[[], object], repeats: int) -> list[float]:
    """Return the least time of each function; they alternate."""
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for index, run in enumerate(runs):
            started = time.perf_counter()
            run()
            best[index] = min(best[index], (time.perf_counter() - started) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parse_arguments(parser, rows=[4], blocks=[8], repeats=2)
    rng = np.random.default_rng(0)
    for blocks in arguments.blocks:
        for rows in arguments.rows:
            lists = [rng.integers(0, 100_000, blocks - row % 4).tolist() for row in range(rows)]
            arrays = [array("i", table) for table in lists]
            np.testing.assert_array_equal(padded_block_tables(arrays), pack_lists(lists))
            ours, theirs = best_microseconds(
                lambda: padded_block_tables(arrays),  # noqa: B023
                lambda: pack_lists(lists),  # noqa: B023
                repeats=arguments.repeats,
            )
            print(
                f"{rows:5} rows of {blocks} blocks: {ours:7.1f} µs, lists {theirs:8.1f} µs, ratio {theirs / ours:.1f}"
            )


if __name__ == "__main__":
    main()
