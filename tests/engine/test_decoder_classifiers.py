"""Decoders as classifiers and rerankers, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, load_oracle, make_checkpoint
from transformers import AutoModelForSequenceClassification

from neso.engine.client.llm import LLM
from neso.engine.errors import EngineError
from neso.generation import InvalidParameter, PoolingParams

ATOL = 1e-4
PROMPTS = [np.random.default_rng(n).integers(6, VOCAB_SIZE, n).tolist() for n in (1, 9, 30)]
LOGITS = PoolingParams(task="classify", activation=False)


def logits_of(directory: Path) -> list[np.ndarray]:
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0].numpy() for ids in PROMPTS]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "mistral", "gpt2", "mixtral"])
def test_logits_equal_those_of_transformers(tmp_path, arch):
    directory = make_checkpoint(tmp_path, arch, labels=3)
    llm = LLM(directory, runner="native")
    for output, expected in zip(llm.pool(PROMPTS, LOGITS), logits_of(directory), strict=True):
        np.testing.assert_allclose(output.values, expected, atol=ATOL)
    assert llm.info.pooling.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
    with pytest.raises(InvalidParameter, match="no LM head"):
        llm.generate("x", progress=False)


@pytest.mark.parametrize("runner", ["reference", "torch"])
@pytest.mark.parametrize("options", [{}, {"max_prefill_chunk": 7, "num_blocks": 12, "block_size": 4}])
def test_runners_and_chunks(tmp_path, runner, options):
    directory = make_checkpoint(tmp_path, "qwen3", labels=2)
    llm = LLM(directory, runner=runner, **options)
    for _ in range(2):  # the second time prefixes are cached
        for output, expected in zip(llm.pool(PROMPTS, LOGITS), logits_of(directory), strict=True):
            np.testing.assert_allclose(output.values, expected, atol=ATOL)


@pytest.mark.parametrize(
    ("labels", "fields"), [(3, {}), (1, {}), (3, {"problem_type": "multi_label_classification"})]
)
def test_probabilities(tmp_path, labels, fields):
    directory = make_checkpoint(tmp_path, "llama", labels=labels, **fields)
    logits = torch.tensor(np.stack(logits_of(directory)))
    expected = logits.softmax(-1) if labels == 3 and not fields else logits.sigmoid()
    np.testing.assert_allclose(LLM(directory).classify(PROMPTS), expected, atol=ATOL)


def test_one_label_scores_pairs_of_texts(tmp_path):
    directory = make_checkpoint(tmp_path, "qwen3", labels=1)
    llm = LLM(directory)
    (joined,) = llm.classify([llm.tokenizer.encode("a query") + llm.tokenizer.encode("a document")])
    np.testing.assert_allclose(llm.score("a query", ["a document"]), joined, atol=ATOL)


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_as_classes(tmp_path, tied):
    """The probability of the second of two tokens, as Qwen3-Reranker's of "yes"."""
    directory = make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=tied)
    oracle = load_oracle(directory)
    with torch.no_grad():
        logits = torch.stack([oracle(torch.tensor([ids])).logits[0, -1] for ids in PROMPTS])
    llm = LLM(directory, classifier_from_token="n,y")
    tokens = [llm.tokenizer.encode(word, add_special_tokens=False)[0] for word in "nyz"]
    expected = logits[:, tokens[:2]].softmax(-1)[:, 1:]
    np.testing.assert_allclose(llm.classify(PROMPTS), expected, atol=ATOL)
    assert llm.info.pooling.labels == ["y"] and llm.info.generates
    three = LLM(directory, classifier_from_token="n,y,z")
    np.testing.assert_allclose(three.classify(PROMPTS), logits[:, tokens].softmax(-1), atol=ATOL)
    assert three.info.pooling.labels == ["n", "y", "z"]


@pytest.mark.parametrize(
    ("arch", "words", "message"),
    [
        ("llama", "yes", "must name at least two tokens"),
        ("llama", "n,!?!?", "is 4 tokens, not one"),
        ("gemma2", "n,y", "caps its logits"),
        ("phi", "n,y", "has a bias"),
    ],
)
def test_tokens_that_cannot_be_classes_are_refused(tmp_path, arch, words, message):
    fields = {"final_logit_softcapping": 30.0} if arch == "gemma2" else {}
    with pytest.raises(EngineError, match=message):
        LLM(make_checkpoint(tmp_path, arch, **fields), classifier_from_token=words)


def test_a_missing_head_is_named(tmp_path):
    directory = make_checkpoint(tmp_path, "llama")
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"no tensor 'score\.weight'"):
        LLM(directory)
