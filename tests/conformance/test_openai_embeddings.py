"""Embeddings, scores and reranking with the `openai` client and plain HTTP, compared with the engine."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import openai
import pytest
from server_process import ServerProcess

from neso.engine.client.llm import LLM
from neso.generation import PoolingParams

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from checkpoints import make_checkpoint, make_encoder

TEXTS = ["The quick brown fox", "A server answers requests, and a client waits for them."]
DOCUMENTS = ["A server answers requests.", "Neso is a moon of Neptune", "def add"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return {
        "embedder": make_encoder(root / "embedder", "bert"),
        "reranker": make_encoder(root / "reranker", "xlm-roberta", labels=1),
        "classifier": make_checkpoint(
            root / "classifier", "qwen3", labels=3, id2label={0: "good", 1: "bad", 2: "neither"}
        ),
    }


@pytest.fixture(scope="module")
def encoders(directories):
    with ServerProcess(*(f"{name}={path}" for name, path in directories.items())) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture
def api(encoders):
    with openai.OpenAI(base_url=encoders.url("/v1", "openai"), api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def embedder(directories):
    return LLM(directories["embedder"])


def test_models(api):
    assert [model.id for model in api.models.list()] == ["classifier", "embedder", "reranker"]
    assert api.models.retrieve("embedder").max_model_len == 130


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_embeddings(api, embedder, encoding):
    # The client requests base64 by default and decodes it.
    given = {"encoding_format": encoding} if encoding else {}
    reply = api.embeddings.create(model="embedder", input=TEXTS, **given)
    assert [entry.index for entry in reply.data] == [0, 1] and reply.object == "list"
    vectors = [entry.embedding for entry in reply.data]
    if encoding == "base64":
        import base64

        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    np.testing.assert_allclose(vectors, embedder.embed(TEXTS), atol=1e-6)
    count = sum(len(embedder.tokenizer.encode(text)) for text in TEXTS)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (count, count)


def test_tokens_and_dimensions(api, embedder):
    ids = embedder.tokenizer.encode(TEXTS[0])
    for given in (ids, [ids]):
        reply = api.embeddings.create(model="embedder", input=given, dimensions=7)
        expected = embedder.embed(ids, PoolingParams(dimensions=7))
        np.testing.assert_allclose([e.embedding for e in reply.data], expected, atol=1e-6)


@pytest.mark.parametrize(
    "given, param",
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": "x " * 300}, "input"),
        ({"input": [100000]}, "input"),
        ({"input": "x", "dimensions": 49}, "dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
    ],
)
def test_invalid_requests_name_the_field(api, given, param):
    with pytest.raises(openai.BadRequestError) as caught:
        api.embeddings.create(model="embedder", **given)
    assert caught.value.param == param


def test_generative_and_embedding_models_are_distinguished(api):
    with pytest.raises(openai.NotFoundError):
        api.embeddings.create(model="nope", input="x")
    with pytest.raises(openai.BadRequestError, match="not a language model"):
        api.completions.create(model="embedder", prompt="x")


def test_long_texts_are_truncated_on_request(api):
    reply = api.embeddings.create(
        model="embedder", input="x " * 300, extra_body={"truncate_prompt_tokens": -1}
    )
    assert reply.usage.prompt_tokens == 130


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank(encoders, directories, path):
    llm = LLM(directories["reranker"])
    body = {
        "model": "reranker",
        "query": "What is Neso?",
        "documents": [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}],
    }
    status, reply = encoders.post(path, {**body, "top_n": 2}, "openai")
    assert status == 200
    scores = llm.score("What is Neso?", DOCUMENTS)
    order = np.argsort(-scores)[:2].tolist()
    assert [result["index"] for result in reply["results"]] == order
    np.testing.assert_allclose([r["relevance_score"] for r in reply["results"]], scores[order], atol=1e-5)
    assert [r["document"]["text"] for r in reply["results"]] == [DOCUMENTS[i] for i in order]
    assert reply["usage"]["total_tokens"] > 0
    status, reply = encoders.post(path, {**body, "return_documents": False}, "openai")
    assert len(reply["results"]) == 3 and "document" not in reply["results"][0]


def test_ranking_as_of_nim(encoders, directories):
    llm = LLM(directories["reranker"])
    body = {
        "model": "reranker",
        "query": {"text": "What is Neso?"},
        "passages": [{"text": text} for text in DOCUMENTS],
    }
    status, reply = encoders.post("/v1/ranking", body, "openai")
    assert status == 200
    logits = [one["logit"] for one in reply["rankings"]]
    assert logits == sorted(logits, reverse=True)
    scores = llm.score("What is Neso?", DOCUMENTS)
    found = 1 / (1 + np.exp(-np.array(logits)))
    np.testing.assert_allclose(found, scores[[one["index"] for one in reply["rankings"]]], atol=1e-5)
    long = {**body, "passages": [{"text": "x " * 300}]}
    status, reply = encoders.post("/v1/ranking", long, "openai")
    assert status == 400 and reply["error"]["param"] == "passages"
    status, reply = encoders.post("/v1/ranking", {**long, "truncate": "END"}, "openai")
    assert status == 200 and 0 < reply["usage"]["prompt_tokens"] <= 130


def test_score(encoders, directories):
    llm = LLM(directories["reranker"])
    body = {"model": "reranker", "text_1": "What is Neso?", "text_2": DOCUMENTS}
    status, reply = encoders.post("/v1/score", body, "openai")
    assert status == 200
    np.testing.assert_allclose(
        [entry["score"] for entry in reply["data"]], llm.score("What is Neso?", DOCUMENTS), atol=1e-5
    )
    pairs = {"model": "embedder", "text_1": TEXTS, "text_2": TEXTS}
    status, reply = encoders.post("/score", pairs, "openai")
    np.testing.assert_allclose([entry["score"] for entry in reply["data"]], [1, 1], atol=1e-5)
    status, reply = encoders.post("/v1/score", {**body, "text_1": ["a", "b"]}, "openai")
    assert status == 400 and reply["error"]["param"] == "text_2"


def test_tensors(encoders, embedder):
    body = {"text_input": TEXTS[0]}
    status, reply = encoders.post("/v2/models/embedder/generate", body)
    assert status == 200
    np.testing.assert_allclose(reply["embedding"], embedder.embed(TEXTS[0])[0], atol=1e-6)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classify(encoders, directories, path):
    llm = LLM(directories["classifier"])
    expected = llm.classify(TEXTS)
    status, reply = encoders.post(path, {"model": "classifier", "input": TEXTS}, "openai")
    assert status == 200 and reply["id"].startswith("classify-")
    assert [entry["index"] for entry in reply["data"]] == [0, 1]
    for entry, probabilities in zip(reply["data"], expected, strict=True):
        np.testing.assert_allclose(entry["probs"], probabilities, atol=1e-5)
        assert entry["label"] == ("good", "bad", "neither")[int(np.argmax(probabilities))]
        assert entry["num_classes"] == 3
    assert reply["usage"]["prompt_tokens"] == sum(len(llm.tokenizer.encode(text)) for text in TEXTS)


def test_classify_returns_logits(encoders, directories):
    ids = LLM(directories["classifier"]).tokenizer.encode(TEXTS[0])
    for field in ("activation", "use_activation"):
        body = {"model": "classifier", "input": ids, field: False}
        status, reply = encoders.post("/classify", body, "openai")
        assert status == 200 and abs(sum(reply["data"][0]["probs"]) - 1) > 1e-3


@pytest.mark.parametrize(
    ("model", "given", "status", "message"),
    [
        ("embedder", "text", 400, "no classifier"),
        ("classifier", [], 400, "must not be empty"),
        ("classifier", "word " * 600, 400, "at most"),
        ("unknown", "text", 404, "unknown"),
    ],
)
def test_classify_errors(encoders, model, given, status, message):
    found, reply = encoders.post("/classify", {"model": model, "input": given}, "openai")
    assert found == status and message in reply["error"]["message"]
