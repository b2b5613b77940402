"""The scripts in examples/clients, run against a server with TensorRT-LLM's layout."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from layout_repository import ANSWER, PROMPT, init
from server_process import ServerProcess

from neso import load_tokenizer

SCRIPTS = Path(__file__).parents[2] / "examples" / "clients"
TOKENIZER = load_tokenizer("neso-pilot")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("repository")
    init(directory, "--max-beam-width=2", "--draft-model=neso-pilot", "--parameter=enable_lora=true")
    with ServerProcess(f"--model-repository={directory}") as server:
        assert server.ports, server.output
        yield server.address("grpc")


def run(script: str, *arguments: str | Path, fails: bool = False) -> str:
    """Return the output of the script, or its errors if it fails."""
    command = [sys.executable, SCRIPTS / f"{script}.py", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert (result.returncode != 0) == fails, result.stdout + result.stderr
    return result.stderr if fails else result.stdout


def tokens(address: str, *arguments: str | Path, fails: bool = False) -> str:
    given = ("-u", address, "--tokenizer-dir=neso-pilot", "--text", PROMPT, *arguments)
    return run("inflight_batcher_llm_client", *given, fails=fails)


def texts(address: str, *arguments: str, fails: bool = False) -> str:
    return run("end_to_end_grpc_client", "-u", address, *arguments, fails=fails)


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_token_ids(address, streaming):
    printed = tokens(address, "--request-output-len=12", *streaming)
    ids = TOKENIZER.encode(PROMPT + ANSWER)
    assert f"Input sequence:  {ids[:4]}" in printed and "Got completed request" in printed
    assert f"Output beam 0: {ANSWER}\nOutput sequence:  {ids[4:]}" in printed


def test_token_ids_in_files(address, tmp_path):
    ids = TOKENIZER.encode(PROMPT + ANSWER)
    for name, part in (("input", ids[:4]), ("draft", ids[4:8]), ("output", ids[4:])):
        (tmp_path / name).write_text(",".join(map(str, part)))
    given = ["-u", address, "--input-tokens-csv", tmp_path / "input", "--request-output-len=12"]
    given += [
        "--draft-tokens-csv",
        tmp_path / "draft",
        "--output-tokens-csv",
        tmp_path / "output",
        "--check-output",
    ]
    printed = run("inflight_batcher_llm_client", *given, "--return-perf-metrics")
    assert "total_accepted_draft_tokens: 4" in printed
    assert "expected" in run("inflight_batcher_llm_client", *given, "--end-id", str(ids[6]), fails=True)


@pytest.mark.parametrize("how", [[], ["--streaming"], ["--streaming", "--stop-via-request-cancel"]])
def test_early_stopping(address, how):
    printed = tokens(address, "--request-output-len=1900", "--end-id=-1", "--stop-after-ms=300", *how)
    found = re.search(r"Output sequence:  \[(.*)\]", printed)
    assert found is not None and 1 < len(found[1].split(",")) < 1900


def test_log_probabilities_of_several_sequences(address):
    printed = tokens(
        address, "--request-output-len=3", "--num-return-sequences=2", "--top-k=5", "--return-log-probs"
    )
    assert printed.count("output_log_probs.shape: (1, 1, 3)") == 2


def test_unreachable_server():
    assert "failed to connect" in tokens("localhost:1", fails=True).lower()


def test_logits(address):
    requested = ("--return-context-logits", "--return-generation-logits", "--return-log-probs")
    for streaming in ([], ["--streaming"]):
        printed = tokens(address, "--request-output-len=5", *requested, *streaming)
        assert "context_logits.shape: (1, 4, 4096)" in printed
        assert "generation_logits.shape: (1, 1, 5, 4096)" in printed
        assert "output_log_probs.shape: (1, 1, 5)" in printed


def test_beams(address):
    printed = tokens(address, "--request-output-len=6", "--beam-width=2")
    assert "Output beam 0:" in printed and "Output beam 1:" in printed
    assert "max_beam_width" in tokens(address, "--beam-width=3", fails=True)


def test_an_adapter(address, tmp_path):
    """An adapter of the first layer's query projection changes the text, also when only its id is sent."""
    rng = np.random.default_rng(0)
    hidden = 256
    rank = 4
    weights = rng.standard_normal((1, 1, rank * hidden + hidden * rank)).astype(np.float16)
    np.save(tmp_path / "model.lora_weights.npy", weights)
    np.save(tmp_path / "model.lora_config.npy", np.array([[[1, 0, rank]]], np.int32))
    plain = tokens(address, "--request-output-len=8")
    adapted = tokens(address, "--request-output-len=8", "--lora-path", tmp_path, "--lora-task-id=7")
    assert adapted != plain
    assert tokens(address, "--request-output-len=8", "--lora-task-id=7") == adapted
    by_text = texts(address, "-p", PROMPT, "-o", "8", "--lora-task-id=7")
    assert by_text.strip().endswith(adapted.split("Output beam 0: ")[1].split("\n")[0].strip())
    assert "lora" in tokens(address, "--lora-task-id=8", fails=True)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text(address, model):
    assert texts(address, "-p", PROMPT, "-o", "12", "--model-name", model).endswith(
        f"[0, 0] {PROMPT}{ANSWER}\n"
    )
    printed = texts(
        address, "-p", PROMPT, "-o", "12", "--model-name", model, "--streaming", "--stop-words", " time"
    )
    assert printed == "[0, 0]  TTFT is the time\n"
    two = f'["{PROMPT}", "What is Neso?"]'
    printed = texts(address, "-p", two, "-o", "12", "--model-name", model, "--batch-inputs", "--streaming")
    assert f"[0, 0] {ANSWER}\n[1, 0] " in printed


def test_text_with_a_draft_model(address):
    given = ("-p", PROMPT, "-o", "12", "--model-name", "tensorrt_llm_bls", "--num-draft-tokens=4")
    assert texts(address, *given).endswith(f"[0, 0] {PROMPT}{ANSWER}\n")


@pytest.mark.parametrize("logits", [[], ["--return-draft-model-draft-logits"]])
def test_speculative_decoding(address, logits):
    given = ("--url-target", address, "-p", PROMPT, "-o", "12", "--num-draft-tokens=4", *logits)
    printed = run("e2e_grpc_speculative_decoding_client", *given)
    assert printed == f"12 tokens in 3 rounds\n{PROMPT}{ANSWER}\n"
