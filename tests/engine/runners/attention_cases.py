"""Test cases of the attention backends: with stand-ins of the libraries on a CPU, and with the libraries on a GPU.

A subclass defines the fixtures `device`, `dtype` and `backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_builder import PlanBuilder, random_tokens, run
from torch import Tensor
from torch_cases import (
    ATTENDED,
    CPU,
    PLAIN,
    Attention,
    load_torch,
    normal,
    plan_of,
    with_operations,
)

from neso.engine.core.step_plan import StepPlan
from neso.engine.runners.torch.attention import AttentionBackend, AttentionNeeds
from neso.engine.runners.torch.kv_cache import LayerCache
from neso.engine.runners.torch.operations import PlainOperations
from neso.engine.runners.torch.step_inputs import step_inputs
from neso.engine.spec_decode.draft import NO_SLOT_COPIES, DraftTreePlan

Factory = Callable[..., Path]

# Up to three blocks of 256.
MIXED, DECODES = ((0, 5), (300, 1), (7, 18), (0, 1), (600, 20)), ((0, 1), (255, 1), (256, 1), (700, 1))
# Kernels of the libraries are for some widths of heads only.
WIDE = {"key_dim": 64, "value_dim": 64}
CASES = {
    "decodes": Attention(DECODES, **WIDE),
    "blocks of 3": Attention(MIXED, block_size=3, **WIDE),
    "groups of three heads": Attention(MIXED, heads=6, **WIDE),
    "wide heads": Attention(MIXED, key_dim=128, value_dim=128),
    "a head of keys for each of queries": Attention(MIXED, kv_heads=4, **WIDE),
    "window": Attention(MIXED, window=270, **WIDE),
    "window of one token": Attention(MIXED, window=1, **WIDE),
    "softcap": Attention(MIXED, softcap=2.5, **WIDE),
    "softcap and window": Attention(MIXED, softcap=2.5, window=9, **WIDE),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", {"head_dim": 64, "num_hidden_layers": 2}),
    "window": ("mistral", {"head_dim": 64, "sliding_window": 9, "num_hidden_layers": 2}),
    "windows and caps": ("gemma2", {"head_dim": 64, "sliding_window": 7, "num_hidden_layers": 3}),
}


class OtherAttention(PlainOperations):
    """Plain operations with the attention of a backend."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention


class AttentionBackendCases:
    """Attention of a backend equals that of `PlainOperations`."""

    @pytest.mark.parametrize("name", CASES)
    def test_attention(
        self, backend: AttentionBackend, device: torch.device, name: str, dtype: torch.dtype
    ) -> None:
        case = CASES[name]
        if case.block_size % backend.block_multiple:
            case = replace(case, block_size=backend.block_multiple)
        attended, expected = _attend_both(backend, device, case, plan_of(case), dtype)
        torch.testing.assert_close(attended, expected, **ATTENDED[dtype])

    def test_blocks_behind_the_window_are_not_read(
        self, backend: AttentionBackend, device: torch.device
    ) -> None:
        """They may belong to other sequences, here with NaN."""
        size = max(backend.block_multiple, 16)
        case = Attention(
            ((5 * size, 3), (4 * size, 1)), key_dim=64, value_dim=64, block_size=size, window=size
        )
        plan = plan_of(case)
        freed = [block for row in plan.block_tables for block in row[:2].tolist()]
        attended, expected = _attend_both(backend, device, case, plan, torch.float16, freed)
        torch.testing.assert_close(attended, expected, **ATTENDED[torch.float16])

    def test_trees_are_computed_by_the_fallback(
        self, backend: AttentionBackend, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []
        fallback = backend._fallback
        monkeypatch.setattr(backend, "_fallback", lambda *args: calls.append(1) or fallback(*args))
        case = Attention(((20, 3),), key_dim=64, value_dim=64, block_size=max(backend.block_multiple, 16))
        masks, depths = np.array([1, 3, 5], np.uint64), np.array([0, 1, 1], np.int32)
        plan = plan_of(case).with_part(DraftTreePlan(NO_SLOT_COPIES, masks, depths))
        attended, expected = _attend_both(backend, device, case, plan, torch.float16)
        torch.testing.assert_close(attended, expected, **ATTENDED[torch.float16])
        assert calls == [1]

    @pytest.mark.parametrize("name", MODELS)
    def test_logits_of_a_model_equal_those_of_plain_operations(
        self, backend: AttentionBackend, checkpoint_factory: Factory, name: str
    ) -> None:
        """Chunked prompts next to decodes, over several steps."""
        arch, overrides = MODELS[name]
        plain = load_torch(checkpoint_factory(arch, **overrides), dtype="bfloat16")
        plain = with_operations(plain, PLAIN)
        runner = with_operations(plain, OtherAttention(backend))
        size = max(backend.block_multiple, 16)
        backend.check(AttentionNeeds(runner.heads, runner.dtype, size))
        builder = PlanBuilder(size, 64, seed=1)
        for each in (plain, runner):
            each.allocate_cache(builder.layout)
            each._graphs = None
        one, two, three = (builder.sequence(random_tokens(length, seed=length)) for length in (52, 25, 40))
        for advances in ([(one, 40), (two, 5)], [(three, 37), (one, 1), (two, 19)], [(three, 1), (one, 1)]):
            plan = builder.plan(advances)
            found, expected = run(runner, plan), run(plain, plan)
            error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
            # Attention is rounded to 8 bits in each layer, and differently.
            assert error < 6 * 2**-9


def _attend_both(
    backend: AttentionBackend,
    device: torch.device,
    case: Attention,
    plan: StepPlan,
    dtype: torch.dtype,
    nan_blocks: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention of the backend in `dtype`, and of plain operations, both in float32 on the CPU."""
    backend.check(AttentionNeeds([], dtype, case.block_size))
    blocks = int(plan.block_tables.max()) + 1
    cache = LayerCache(
        normal(blocks, case.block_size, case.kv_heads, case.key_dim, dtype=dtype, seed=1),
        normal(blocks, case.block_size, case.kv_heads, case.value_dim, dtype=dtype, seed=2),
    )
    for block in nan_blocks or []:
        cache.keys[block], cache.values[block] = torch.nan, torch.nan
    # Queries lie next to keys and values.
    queries = normal(plan.num_tokens, case.heads + 3, case.key_dim, dtype=dtype)
    options = (case.window, 1.3 * case.key_dim**-0.5, case.softcap)
    attended = backend(
        queries.to(device)[:, : case.heads],
        LayerCache(cache.keys.to(device), cache.values.to(device)),
        step_inputs(plan, case.block_size, device),
        *options,
    )
    assert attended.dtype == dtype
    expected = PLAIN.attention(
        queries[:, : case.heads].float(),
        LayerCache(cache.keys.float(), cache.values.float()),
        step_inputs(plan, case.block_size, CPU),
        *options,
    )
    return attended.cpu().float(), expected
