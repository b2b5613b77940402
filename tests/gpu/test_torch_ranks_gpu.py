"""The torch runner on two GPUs with NCCL, including CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from parallel.test_torch_ranks import run_ranks
from runners.model_cases import MODELS
from runners.plan_builder import mixed_batch

from neso.engine.runners.runner_options import RunnerOptions
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import open_source

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
def test_logits_equal_one_gpu(
    checkpoint_factory: Callable[..., Path], tmp_path: Path, layout: tuple[int, int]
) -> None:
    cases = [MODELS[name] for name in ("gemma2", "gpt_neox", "olmo2", "qwen2_moe")]
    models = [checkpoint_factory(arch, **overrides) for arch, overrides in cases]
    found = run_ranks(tmp_path / "logits.npz", layout, "float32", models)
    for model, logits in zip(models, found, strict=True):
        with open_source(model) as source:
            runner = TorchRunner.load(decoder_spec(source.config), source, RunnerOptions(dtype="float32"))
        np.testing.assert_allclose(logits, mixed_batch(runner), atol=5e-3)
