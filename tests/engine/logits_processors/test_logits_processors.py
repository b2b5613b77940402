"""Logits processors: applied to the rows of the requests that choose them, alone and with other features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neso.engine.client.llm import LLM
from neso.engine.errors import EngineError
from neso.engine.logits_processors.processor import (
    ProcessorContext,
    ProcessorError,
    SequenceTokens,
    load_processors,
)
from neso.generation import DraftTokens, InvalidParameter, SamplingParams

PROMPT = [5, 6, 7]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def successor(logits: np.ndarray, sequences: Sequence[SequenceTokens]) -> None:
    """Allow only the number after the last token."""
    for row, sequence in zip(logits, sequences, strict=True):
        last = [*sequence.prompt_token_ids, *sequence.output_token_ids][-1]
        row[np.arange(len(row)) != last + 1] = -np.inf


class NoRepeats:
    """Bans the output tokens of a sequence, for all rows of a step in one assignment."""

    def __init__(self, context: ProcessorContext) -> None:
        self.width = context.vocab_size
        self.batch_sizes: list[int] = []

    def __call__(self, logits: np.ndarray, sequences: Sequence[SequenceTokens]) -> None:
        assert logits.shape == (len(sequences), self.width)
        self.batch_sizes.append(len(sequences))
        rows = [i for i, sequence in enumerate(sequences) for _ in sequence.output_token_ids]
        logits[rows, [token for sequence in sequences for token in sequence.output_token_ids]] = -np.inf


def fails_after_two(logits: np.ndarray, sequences: Sequence[SequenceTokens]) -> None:
    logits[:] = 0
    for sequence in sequences:
        if sequence.prompt_token_ids[0] == 9 and len(sequence.output_token_ids) == 2:
            raise RuntimeError("no third token")


def successor_until_50(logits: np.ndarray, sequences: Sequence[SequenceTokens]) -> None:
    successor(logits, sequences)
    if any(50 in sequence.output_token_ids for sequence in sequences):
        raise RuntimeError("50 was generated")


PROCESSORS = {
    "successor": successor,
    "no_repeats": NoRepeats,
    "fails": fails_after_two,
    "until_50": successor_until_50,
}


@pytest.fixture(scope="module", params=["reference", "native", "torch"])
def llm(request: pytest.FixtureRequest, llama_checkpoint: Path) -> LLM:
    return LLM(llama_checkpoint, runner=request.param, num_threads=1, logits_processors=PROCESSORS)


def tokens(llm: LLM, *prompts: list[int], **sampling: Any) -> list[list[int]]:
    params = SamplingParams(**{**GREEDY, **sampling})
    results = llm.generate(list(prompts), params, progress=False)
    llm.core.check_integrity()
    assert llm.core.scheduler.kv.pool.num_used == 0
    return [list(output.token_ids) for result in results for output in result.outputs]


def test_the_processor_decides_the_tokens(llm):
    assert tokens(llm, PROMPT, [20], logits_processor="successor") == [
        list(range(8, 16)),
        list(range(21, 29)),
    ]


def test_requests_without_it_are_not_changed(llm):
    plain = SamplingParams(**GREEDY)
    chosen = SamplingParams(**GREEDY, logits_processor="successor")
    alone = tokens(llm, PROMPT)[0]
    results = llm.generate([PROMPT, PROMPT, PROMPT], [plain, chosen, plain], progress=False)
    together = [list(result.outputs[0].token_ids) for result in results]
    assert together == [alone, list(range(8, 16)), alone]


def test_one_call_processes_all_rows_of_a_step(llm):
    outputs = tokens(llm, *([number] for number in range(5)), logits_processor="no_repeats", max_tokens=30)
    assert all(len(set(output)) == 30 for output in outputs)
    processors = llm.core.addons
    (addon,) = [addon for addon in processors if type(addon).__name__ == "LogitsProcessors"]
    assert max(addon._processors["no_repeats"].batch_sizes) == 5


def test_several_sequences_of_a_request(llm):
    outputs = tokens(llm, PROMPT, logits_processor="no_repeats", n=4, temperature=1.0, seed=1, max_tokens=20)
    assert len(outputs) == 4 and len({tuple(output) for output in outputs}) > 1
    assert all(len(set(output)) == 20 for output in outputs)


def test_a_failure_ends_only_its_request(llm):
    params = SamplingParams(**GREEDY, logits_processor="fails")
    with pytest.raises(EngineError, match="'fails' failed: no third token"):
        llm.generate([[9]], params, progress=False)
    outcomes: dict[int, Any] = {}
    streams = {first: llm.stream([first], params) for first in (8, 9, 10)}
    for first, stream in streams.items():
        try:
            outcomes[first] = [token for output in stream for token in output.outputs[0].token_ids]
        except EngineError as error:
            outcomes[first] = str(error)
    assert "no third token" in outcomes.pop(9)
    assert list(outcomes.values()) == [[0] * 8, [0] * 8]
    assert llm.core.scheduler.kv.pool.num_used == 0
    stats = llm.core.stats().logits_processors["fails"]
    assert stats.failures >= 2 and stats.rows > stats.failures and stats.seconds > 0


def test_drafts_are_verified_with_processed_logits(llm):
    params = SamplingParams(**GREEDY, logits_processor="successor")
    for draft in ([8, 9, 10, 11], [8, 9, 50, 51], [50]):
        (result,) = llm.generate([PROMPT], params, drafts=[DraftTokens(draft)], progress=False)
        assert list(result.outputs[0].token_ids) == list(range(8, 16))


def test_failure_after_a_rejected_draft_token_is_ignored(llm):
    params = SamplingParams(**GREEDY, logits_processor="until_50")
    for draft in ([8, 9, 50, 51], [50], [8, 50, 9]):
        (result,) = llm.generate([PROMPT], params, drafts=[DraftTokens(draft)], progress=False)
        assert list(result.outputs[0].token_ids) == list(range(8, 16))


def test_failure_after_an_accepted_draft_token_ends_the_request(llm):
    params = SamplingParams(**GREEDY, logits_processor="until_50")
    for draft in ([49, 50], [49, 50, 51]):
        with pytest.raises(EngineError, match="50 was generated"):
            llm.generate([[48]], params, drafts=[DraftTokens(draft)], progress=False)
        assert llm.core.scheduler.kv.pool.num_used == 0


def test_with_ngram_speculation(llama_checkpoint):
    llm = LLM(
        llama_checkpoint,
        runner="native",
        num_threads=1,
        speculative="ngram",
        num_speculative_tokens=3,
        logits_processors=PROCESSORS,
    )
    expected = LLM(llama_checkpoint, runner="native", num_threads=1, logits_processors=PROCESSORS)
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    for name in ("no_repeats", "successor"):
        given = {"logits_processor": name, "max_tokens": 20}
        assert tokens(llm, prompt, **given) == tokens(expected, prompt, **given)


def test_penalties_and_bans_apply_after_it(llm):
    def first(**params: Any) -> list[int]:
        return tokens(llm, PROMPT, logits_processor="fails", max_tokens=2, **params)[0]

    assert first(logit_bias={3: 1.0}) == [3, 3]
    assert first(logit_bias={3: 1.0}, presence_penalty=2.0) == [3, 0]


def test_unknown_name(llm):
    with pytest.raises(InvalidParameter, match=r"'upper' is not registered .*successor, no_repeats, fails"):
        tokens(llm, PROMPT, logits_processor="upper")


def test_not_with_beams():
    with pytest.raises(InvalidParameter, match="beam search") as caught:
        SamplingParams(beam_width=2, logits_processor="successor")
    assert caught.value.field == "logits_processor"


def test_trtllm_name():
    params = SamplingParams.from_mapping({"logits_post_processor_name": "successor"})
    assert params.logits_processor == "successor"


def test_places(tmp_path):
    file = tmp_path / "own processors.py"
    file.write_text("class Space:\n    @staticmethod\n    def ban(logits, sequences): ...\n")
    context = ProcessorContext(100, None)
    found = load_processors({"own": f"{file}:Space.ban", "numpy": "numpy:negative"}, context)
    assert found["own"].__name__ == "ban" and found["numpy"] is np.negative


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("absent.py:run", "absent.py: there is no such file"),
        ("no_such_module:run", "No module named 'no_such_module'"),
        ("json:no_such_attribute", "no_such_attribute"),
        ("unregistered", "no entry point 'unregistered' in the group neso.logits_processors"),
        ("math:pi", "not callable"),
    ],
)
def test_wrong_places(place, message, llama_checkpoint):
    with pytest.raises(ProcessorError, match=message):
        load_processors({"x": place}, ProcessorContext(100, None))
    with pytest.raises(EngineError, match="logits processor 'x'"):
        LLM(llama_checkpoint, runner="reference", logits_processors={"x": place})


def test_entry_point(tmp_path, monkeypatch):
    (tmp_path / "plugin_of_a_test.py").write_text("def run(logits, sequences): ...\n")
    package = tmp_path / "plugin_of_a_test-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-a-test\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[neso.logits_processors]\nmine = plugin_of_a_test:run\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_processors({"x": "mine"}, ProcessorContext(100, None))["x"].__name__ == "run"
