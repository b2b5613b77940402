"""Replayed steps give the same logits on the same runner and on another one."""

from __future__ import annotations

import numpy as np
import pytest

from neso.engine.client.llm import LLM
from neso.engine.diagnostics.replay import load_runner, main, read_engine, read_steps, replay
from neso.engine.errors import EngineError
from neso.generation import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def recording(tmp_path_factory, checkpoint_factory):
    """Record some requests with chunks and preemption; return the folder and the output tokens."""
    folder = tmp_path_factory.mktemp("recording") / "steps"
    llm = LLM(
        checkpoint_factory("llama"),
        runner="native",
        dtype="float32",
        num_blocks=12,
        block_size=4,
        max_prefill_chunk=7,
        record_steps=str(folder),
    )
    prompts = [list(range(10, 30)), list(range(40, 55)), [7, 8]]
    results = llm.generate(prompts, GREEDY, progress=False)
    return folder, [result.outputs[0].token_ids for result in results]


def test_every_step_is_recorded_with_its_tokens(recording):
    folder, tokens = recording
    plans = list(read_steps(folder))
    assert [plan.step for plan in plans] == list(range(1, len(plans) + 1))
    assert all((plan.token_ids >= 0).all() for plan in plans)
    fed = {token for plan in plans for token in plan.token_ids.tolist()}
    assert {token for response in tokens for token in response[:-1]} <= fed


def test_replay_on_two_runners_agrees(recording, capsys):
    folder, _ = recording
    assert main([str(folder), "--against", "reference"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(read_steps(folder))) + 2
    assert all(float(line.split()[-1]) < 1e-3 for line in lines[1:-1] if len(line.split()) > 4)


def test_replay_detects_a_different_runner(recording):
    folder, _ = recording
    recorded = read_engine(folder)
    good, bad = load_runner(recorded.config, "reference"), load_runner(recorded.config, "reference")
    bad._weights.lm_head[:] = np.roll(bad._weights.lm_head, 1, axis=0)  # type: ignore[attr-defined]
    steps = list(replay(folder, [good, bad]))
    assert any(step.same_tokens is False and step.max_difference > 0.1 for step in steps)


def test_an_unwritable_folder_is_an_error(tmp_path, checkpoint_factory):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="record_steps"):
        LLM(checkpoint_factory("llama"), record_steps=str(tmp_path / "file" / "steps"))


def test_a_write_error_ends_only_the_recording(tmp_path, checkpoint_factory, caplog):
    folder = tmp_path / "steps"
    llm = LLM(checkpoint_factory("llama"), runner="reference", record_steps=str(folder))
    (folder / "step-000000002.npz").mkdir()
    (result,) = llm.generate([[7, 8]], GREEDY, progress=False)
    assert len(result.outputs[0].token_ids) == 6
    assert caplog.text.count("recording of steps stopped") == 1
    assert not (folder / "step-000000003.npz").exists()
