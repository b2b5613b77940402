"""Default limits of a step by device: which ones there are, and that every part of the engine uses them."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch_cases import load_torch

from neso.engine.config import EngineConfig
from neso.engine.core.scheduler_config import CPU_LIMITS, SchedulerOptions, StepLimits, gpu_limits
from neso.engine.errors import EngineError
from neso.engine.load.loader import load_engine
from neso.engine.parallel.ranked_runner import RankedRunner
from neso.engine.runners.torch.device_runner import DeviceRunner

H100 = StepLimits(1024, 8192)


@pytest.mark.parametrize(
    ("name", "gigabytes", "limits"),
    [
        ("NVIDIA H100 80GB HBM3", 79, H100),
        ("NVIDIA H200", 139, H100),
        ("NVIDIA B200", 178, StepLimits(1024, 16384)),
        ("NVIDIA A100-SXM4-80GB", 79, StepLimits(256, 2048)),
        ("NVIDIA L4", 22, StepLimits(256, 2048)),
    ],
)
def test_defaults_of_gpus(name, gigabytes, limits):
    assert gpu_limits(name, gigabytes << 30) == limits


@pytest.mark.parametrize(
    ("options", "defaults", "expected"),
    [
        ({}, CPU_LIMITS, (64, 1024, 512)),
        ({}, H100, (1024, 8192, 8192)),
        ({"max_num_seqs": 3}, H100, (3, 8192, 8192)),
        ({"max_num_batched_tokens": 100}, CPU_LIMITS, (64, 100, 100)),
        ({"max_num_batched_tokens": 16}, H100, (16, 16, 16)),
        ({"max_num_seqs": 5000}, CPU_LIMITS, (5000, 5000, 512)),
        ({"max_num_batched_tokens": 20000, "max_prefill_chunk": 512}, H100, (1024, 20000, 512)),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 2, "max_prefill_chunk": 1}, CPU_LIMITS, (2, 2, 1)),
    ],
)
def test_given_limits_win_and_defaults_give_way_to_them(options, defaults, expected):
    resolved = SchedulerOptions(block_size=4, **options).resolve(defaults)
    found = (resolved.max_num_seqs, resolved.max_num_batched_tokens, resolved.max_prefill_chunk)
    assert found == expected and resolved.block_size == 4


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk"])
def test_limits_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        EngineConfig.from_options("model", {name: 0})


def test_a_token_budget_below_the_number_of_sequences_is_rejected():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"):
        EngineConfig.from_options("model", {"max_num_seqs": 8, "max_num_batched_tokens": 7})


def test_the_torch_runner_asks_its_device(llama_checkpoint, monkeypatch):
    runner = load_torch(llama_checkpoint)
    assert runner.default_limits == CPU_LIMITS
    asked = []

    def properties(device):
        asked.append(device)
        return SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 << 30)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    runner.device = torch.device("cuda", 1)
    assert runner.default_limits == H100 and asked == [runner.device]
    ranked = RankedRunner.__new__(RankedRunner)
    ranked._own = runner
    assert ranked.default_limits == H100


def test_every_part_of_the_engine_has_the_limits_of_the_device(llama_checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(DeviceRunner, "default_limits", property(lambda runner: StepLimits(7, 96)))
    config = EngineConfig.from_options(str(llama_checkpoint), {"runner": "torch", "max_model_len": 32})
    with caplog.at_level(logging.INFO, "neso.engine.load.loader"):
        core, info = load_engine(config)
    scheduler = core.scheduler.config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_prefill_chunk) == (
        7,
        96,
        96,
    )
    assert (info.max_num_seqs, info.max_num_batched_tokens, info.num_blocks) == (7, 96, 14)
    assert "max_num_batched_tokens 96, max_num_seqs 7" in caplog.text


def test_a_default_that_does_not_fit_is_named(llama_checkpoint, monkeypatch):
    monkeypatch.setattr(DeviceRunner, "default_limits", property(lambda runner: StepLimits(1024, 1 << 40)))
    options = {"runner": "torch", "kv_cache_free_gpu_mem_fraction": 1.0}
    with pytest.raises(EngineError, match=r"lower max_num_batched_tokens \(1099511627776\)"):
        load_engine(EngineConfig.from_options(str(llama_checkpoint), options))
