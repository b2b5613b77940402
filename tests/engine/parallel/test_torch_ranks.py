"""The torch runner on ranks started by torchrun, with gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from free_port import free_port
from parallel.thread_ranks import thread_communicators
from runners.model_cases import MODELS
from runners.plan_builder import mixed_batch

from neso.engine.parallel.launched_rank import launched_rank
from neso.engine.parallel.layout import RankLayout
from neso.engine.runners.registry import open_model, runner_class
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.runners.torch.ranks import device_of_rank, meeting_point
from neso.engine.runners.torch.runner import TorchRunner
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import open_source

Factory = Callable[..., Path]
SCRIPT = Path(__file__).with_name("torch_rank_process.py")


def run_ranks(output: Path, layout: tuple[int, int], dtype: str, models: list[Path]) -> list[np.ndarray]:
    """The logits of `mixed_batch` on ranks, for each model."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(layout[0] * layout[1])),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *(str(SCRIPT), str(output), str(layout[0]), str(layout[1]), dtype, *map(str, models)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(output) as results:
        return [results[str(index)] for index in range(len(models))]


def on_one_rank(model: Path, dtype: str) -> np.ndarray:
    with open_source(model) as source:
        options = RunnerOptions(dtype=dtype, num_threads=1)  # type: ignore[arg-type]
        return mixed_batch(TorchRunner.load(decoder_spec(source.config), source, options))


@pytest.mark.parametrize(
    "layout",
    [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow), pytest.param((2, 2), marks=pytest.mark.slow)],
)
def test_logits_equal_one_rank(checkpoint_factory: Factory, tmp_path: Path, layout: tuple[int, int]) -> None:
    names = ["llama", "gemma2", "gpt_neox", "olmo2", "qwen2_moe"]
    models = [
        checkpoint_factory(*MODELS.get(name, (name, {}))[:1], **MODELS.get(name, (name, {}))[1])
        for name in names
    ]
    found = run_ranks(tmp_path / "logits.npz", layout, "float32", models)
    for model, logits in zip(models, found, strict=True):
        np.testing.assert_allclose(logits, on_one_rank(model, "float32"), atol=2e-4)


@pytest.mark.slow
def test_bfloat16(checkpoint_factory: Factory, tmp_path: Path) -> None:
    model = checkpoint_factory("llama", dtype="bfloat16")
    (found,) = run_ranks(tmp_path / "logits.npz", (2, 2), "auto", [model])
    expected = on_one_rank(model, "auto")
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_a_step_before_connect_is_an_error(checkpoint_factory: Factory) -> None:
    with open_source(checkpoint_factory("llama")) as source:
        options = RunnerOptions(layout=RankLayout(1, 2))
        runner = TorchRunner.load(decoder_spec(source.config), source, options)
    with pytest.raises(RuntimeError, match="connect must come before the first step"):
        mixed_batch(runner)


def test_runners_without_ranks_are_rejected(checkpoint_factory: Factory) -> None:
    with (
        open_source(checkpoint_factory("llama")) as source,
        pytest.raises(UnsupportedOption, match="cannot be split among ranks"),
    ):
        open_model(source, "transformers", RunnerOptions(layout=RankLayout(0, 2)), lambda length: length)


def test_every_rank_of_a_host_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert device_of_rank(RankLayout(1, 4)).index == 1
    monkeypatch.setenv("SLURM_LOCALID", "0")
    assert device_of_rank(RankLayout(2, 4)).index == 0
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UnsupportedOption, match="rank 2 needs a GPU of its own, but this host has 2"):
        device_of_rank(RankLayout(2, 4))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert device_of_rank(RankLayout(2, 4)).index == 0
    assert chosen == [1, 0, 0]


def test_ranks_of_other_launchers_meet_at_a_port_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    communicators = thread_communicators(3, 1)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda c: meeting_point(c.layout, c), communicators))
    assert len(set(found)) == 1
    assert found[0].startswith("tcp://")
    assert int(found[0].rpartition(":")[2]) > 0


def test_ranks_of_torchrun_are_recognized() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2"}
    assert launched_rank(variables) is None
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}
    srun = launched_rank({**variables, **slurm})
    assert srun is not None and (srun.rank, srun.size) == (0, 4)
    for others in ({}, slurm):
        found = launched_rank({**variables, **others, "TORCHELASTIC_RUN_ID": "none"})
        assert found is not None and (found.rank, found.size) == (1, 2)


def test_the_native_runner_is_not_split_by_torchrun(checkpoint_factory: Factory) -> None:
    with open_source(checkpoint_factory("llama")) as source:
        options = RunnerOptions(layout=RankLayout(0, 2), num_threads=1)
        runner = runner_class("native").load(decoder_spec(source.config), source, options)
    (communicator, _) = thread_communicators(2, 1)
    communicator.native_all_reduce = None
    with pytest.raises(UnsupportedOption, match="not by torchrun"):
        runner.connect(communicator)
