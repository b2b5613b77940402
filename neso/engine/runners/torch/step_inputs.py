"""Step plans on the device, and transfers to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neso.engine.addons.image_positions import rotary_positions
from neso.engine.addons.input_embeddings import EmbeddingPlan
from neso.engine.core.step_plan import StepPlan
from neso.engine.lora.adapter import LoraPlan
from neso.engine.pooling.pooler import PoolingPlan
from neso.engine.spec_decode.draft import DraftTreePlan, token_positions

Int32Array = npt.NDArray[np.int32]

MAX_FEW_ROWS = 256
"""Maximum number of new tokens of a step whose adapters are computed in tiles of `AdapterRows.FEW` rows."""


def send(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device asynchronously; on the CPU, return a view.

    Goes through pinned memory, because a copy from pageable memory would wait for the device.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def send_together(arrays: list[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one transfer; returns int32 tensors that are views of one buffer.

    The tensors start at multiples of 16 bytes, because Triton compiles another variant of a kernel for each argument
    that does not.
    """
    ends = np.cumsum([-(-array.size // 4) * 4 for array in arrays])
    packed = np.zeros(ends[-1], np.int32)
    starts = [0, *ends[:-1].tolist()]
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.size] = array.reshape(-1)
    sent = send(packed, device)
    return [
        sent[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapter of each row of a product, int32.

    - slots[rows]: the adapter slot of each row, -1 for none
    - tiles[N, tile_rows]: the rows with an adapter; the rows of a tile have the same slot. Empty places, at the end of
      a tile, are -1. `tile_rows` is `FEW` in steps with few rows, otherwise `MANY`.
    """

    FEW: ClassVar[int] = 16
    MANY: ClassVar[int] = 64

    slots: Tensor
    tiles: Tensor


def adapter_tiles(slots: Int32Array, tile_rows: int) -> Int32Array:
    """Return `AdapterRows.tiles` for slots int32[rows]."""
    rows = np.argsort(slots, kind="stable").astype(np.int32)
    rows = rows[np.count_nonzero(slots < 0) :]
    _, counts = np.unique(slots[rows], return_counts=True)
    num_tiles = -(-counts // tile_rows)
    empty = num_tiles * tile_rows - counts
    places = np.arange(len(rows)) + np.repeat(np.cumsum(empty) - empty, counts)
    tiles = np.full((num_tiles.sum(), tile_rows), -1, np.int32)
    tiles.reshape(-1)[places] = rows
    return tiles


def max_adapter_tiles(rows: int, slots: int) -> int:
    """Return the maximum number of tiles of `FEW` rows for a number of rows with any of the slots."""
    return min(rows, rows // AdapterRows.FEW + slots)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Per-step inputs of all layers; tensors are int32.

    With T new tokens, S sequences, R logits rows, H hidden rows:

    - token_ids, positions, slots [T]; slot = block * block_size + offset. Rotary positions on three axes are [3, T]
    - query_start[S + 1], num_computed[S], block_tables[S, B]: as in the plan
    - decodes[D]: sequences with one new token; prefills[P, 2]: (sequence, first new token) of each tile of at most
      `tile_queries` queries of the other sequences
    - plan: the plan on the host
    - sinks: first tokens of a sequence that stay visible in layers with a window
    - logits_rows[R + H]: `output_rows`; None if these are all tokens in order
    - adapters, output_adapters: adapters of the new tokens, and of `output_rows`; None if no sequence has one
    - embedding_positions[E], embeddings float32[E, hidden]: rows that replace token embeddings; None if there are none
    - tree_masks int64[T], tree_depths[T]: as in `DraftTreePlan`; None if no token is in a tree
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_start: Tensor
    num_computed: Tensor
    block_tables: Tensor
    decodes: Tensor
    prefills: Tensor
    tile_queries: int
    plan: StepPlan
    logits_rows: Tensor | None = None
    sinks: int = 0
    embedding_positions: Tensor | None = None
    embeddings: Tensor | None = None
    adapters: AdapterRows | None = None
    output_adapters: AdapterRows | None = None
    tree_masks: Tensor | None = None
    tree_depths: Tensor | None = None


def step_inputs(
    plan: StepPlan,
    block_size: int,
    device: torch.device,
    chosen: Tensor | None = None,
    sinks: int = 0,
    tile_queries: int = 16,
) -> StepInputs:
    """Copy a plan to the device in one asynchronous transfer.

    A token id -1 - r is replaced by chosen[r], an int32 token that the device may not have computed yet.
    """
    lengths = np.diff(plan.query_start)
    arrays: dict[str, npt.NDArray[Any]] = {
        "token_ids": plan.token_ids,
        "positions": rotary_positions(plan, token_positions(plan)),
        "slots": plan.slots(block_size),
        "query_start": plan.query_start,
        "num_computed": plan.num_computed,
        "block_tables": plan.block_tables,
        "decodes": np.flatnonzero(lengths == 1),
        "prefills": _prefill_tiles(lengths, tile_queries),
        "logits_rows": output_rows(plan),
    }
    lora = plan.part(LoraPlan)
    if lora is not None:
        slots = np.repeat(lora.slots, lengths)
        tile_rows = AdapterRows.FEW if plan.num_tokens <= MAX_FEW_ROWS else AdapterRows.MANY
        for name, rows in (("adapter", slots), ("output", slots[output_rows(plan)])):
            arrays |= {f"{name} slots": rows, f"{name} tiles": adapter_tiles(rows, tile_rows)}
    tensors = dict(zip(arrays, send_together(list(arrays.values()), device), strict=True))
    adapters, output_adapters = (
        None if lora is None else AdapterRows(tensors.pop(f"{name} slots"), tensors.pop(f"{name} tiles"))
        for name in ("adapter", "output")
    )
    tensors["token_ids"] = resolve_tokens(plan, tensors["token_ids"], chosen)
    if wants_all_rows(plan):
        del tensors["logits_rows"]
    embeddings, tree = plan.part(EmbeddingPlan), plan.part(DraftTreePlan)
    # Copies, because the plan's arrays are read-only and tensors cannot be.
    if embeddings is not None:
        (tensors["embedding_positions"],) = send_together([embeddings.positions], device)
        tensors["embeddings"] = send(embeddings.rows.copy(), device)
    if tree is not None and len(tree.masks):
        tensors["tree_masks"] = send(tree.masks.astype(np.int64), device)
        tensors["tree_depths"] = send(tree.depths.copy(), device)
    return StepInputs(
        **tensors,
        tile_queries=tile_queries,
        plan=plan,
        sinks=sinks,
        adapters=adapters,
        output_adapters=output_adapters,
    )


def resolve_tokens(plan: StepPlan, token_ids: Tensor, chosen: Tensor | None) -> Tensor:
    """Replace references to tokens of the previous step in the plan's `token_ids` on the device."""
    if chosen is None or not (plan.token_ids < 0).any():
        return token_ids
    # Clamped, because a row with NaN logits has no valid token; its sequence ends and the result is discarded.
    rows = (-1 - token_ids).clamp(0, len(chosen) - 1)
    return torch.where(token_ids < 0, chosen[rows.long()].clamp(min=0), token_ids)


def output_rows(plan: StepPlan) -> Int32Array:
    """Return the flat positions whose final states are needed: the logits rows, then the pooled rows."""
    pooling = plan.part(PoolingPlan)
    return plan.logits_rows if pooling is None else np.concatenate([plan.logits_rows, pooling.rows])


def wants_all_rows(plan: StepPlan) -> bool:
    """Whether logits are requested for all new tokens, in order."""
    return plan.part(PoolingPlan) is None and np.array_equal(plan.logits_rows, np.arange(plan.num_tokens))


def choose_tile_queries(heads_per_kv_head: int, head_dim: int) -> int:
    """Return the number of new tokens in a tile of a prefill.

    A tile has a row for each token and query head of a key-value head: 64 rows of up to 128 columns, or 32 of 256,
    for which a thread block has enough registers.
    """
    rows = 64 if head_dim <= 128 else 32
    return max(rows // heads_per_kv_head, 1)


def _prefill_tiles(lengths: Int32Array, tile_queries: int) -> npt.NDArray[np.int64]:
    """Return (sequence, first new token) of every tile, [P, 2]; longest sequences first, because they take longest."""
    sequences = np.flatnonzero(lengths > 1)
    sequences = sequences[np.argsort(-lengths[sequences], kind="stable")]
    counts = -(-lengths[sequences] // tile_queries)
    ends = np.cumsum(counts)
    indices = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.stack([np.repeat(sequences, counts), indices * tile_queries], axis=1)
