"""The embedding backend in a running core."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import orjson
import pytest

import neso.server.core
from neso.engine.client.llm import LLM
from neso.generation import PoolingParams
from neso.server.admission import AdmissionLimits
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.options import ModelControlMode, ServerOptions
from neso.server.tensor import Tensor

sys.path.append(str(Path(__file__).parents[2] / "engine"))
from checkpoints import make_checkpoint, make_encoder

MODELS = {"bert": "embedding", "reranker": "embedding", "classes": "embedding", "decoder": "llm"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "bert": make_encoder(root / "bert", "bert"),
        "reranker": make_encoder(root / "reranker", "xlm-roberta", labels=1),
        "classes": make_encoder(root / "classes", "bert", labels=3),
        "decoder": make_checkpoint(root / "decoder", "llama"),
    }


@pytest.fixture
async def core(tmp_path, checkpoints):
    for name, backend in MODELS.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(f'backend: "{backend}"')
        options = {"model": str(checkpoints[name]), "num_threads": 1}
        if backend == "llm":
            options["num_blocks"] = 32
        (tmp_path / name / "1" / "model.json").write_bytes(orjson.dumps(options))
    options = ServerOptions(
        model_repository=(tmp_path,),
        model_control_mode=ModelControlMode.EXPLICIT,
        startup_models=("*",),
        backend_config={name: {"in-process": "true"} for name in ("llm", "embedding")},
    )
    core = neso.server.core.Core(options)
    await core.start()
    assert core.ready(), core.repository_index()
    yield core
    await core.stop()


async def infer(core, model: str, outputs=(), parameters=None, **inputs):
    tensors = {
        name: Tensor.from_strings(name, value)
        if name.startswith("text")
        else Tensor.from_numpy(name, np.array(value))
        for name, value in inputs.items()
    }
    request = InferenceRequest(model, tensors, parameters=parameters or {}, requested_outputs=list(outputs))
    (response,) = [r async for r in core.model(model).submit(request)]
    return response


async def test_embeddings(core, checkpoints):
    llm = LLM(checkpoints["bert"], runner="native", num_threads=1)
    texts = ["The quick brown fox", "A server", "x"]
    response = await infer(core, "bert", text_input=texts)
    assert response.error is None
    embedding = response.output("embedding").array
    np.testing.assert_allclose(embedding, llm.embed(texts), atol=1e-6)
    lengths = [len(llm.tokenizer.encode(text)) for text in texts]
    assert response.output("num_input_tokens").array.tolist() == lengths
    response = await infer(
        core, "bert", text_input=texts, dimensions=np.array([8], np.int32), normalize=[False]
    )
    expected = llm.embed(texts, PoolingParams(dimensions=8, normalize=False))
    np.testing.assert_allclose(response.output("embedding").array, expected, atol=1e-6)
    response = await infer(core, "bert", text_input=texts, parameters={"dimensions": 4})
    assert response.output("embedding").array.shape == (3, 4)


async def test_scores_and_probabilities(core, checkpoints):
    llm = LLM(checkpoints["reranker"], runner="native", num_threads=1)
    documents = ["Neso is a moon", "A server answers"]
    response = await infer(core, "reranker", text_input=["What is Neso?"], text_pair=documents)
    scores = response.output("score").array
    np.testing.assert_allclose(scores, llm.score("What is Neso?", documents), atol=1e-6)
    response = await infer(core, "classes", ["probabilities"], text_input=documents)
    np.testing.assert_allclose(response.output("probabilities").array.sum(axis=1), 1, atol=1e-5)


async def test_errors_are_reported(core):
    long = ["word " * 200]
    response = await infer(core, "bert", text_input=long)
    assert "at most 130" in response.error.message
    assert (await infer(core, "bert", text_input=long, truncate=[True])).error is None
    response = await infer(core, "bert", text_input=["x"], dimensions=np.array([100], np.int32))
    assert "dimensions" in response.error.message
    for name, value in {"dimensions": "many", "normalize": "perhaps", "truncate": 3}.items():
        response = await infer(core, "bert", text_input=["x"], parameters={name: value})
        assert isinstance(response.error, InvalidArgument) and response.error.message.startswith(f"{name}: ")
    assert (await infer(core, "bert", text_input=long, parameters={"truncate": "false"})).error is not None
    response = await infer(core, "bert", ["probabilities"], text_input=["x"])
    assert "no classifier" in response.error.message
    response = await infer(core, "classes", text_input=["x"], text_pair=["y"])
    assert "3 outputs" in response.error.message


@pytest.mark.parametrize("pairs", [0, 1, 3])
async def test_texts_count_as_sequences(core, pairs: int):
    core.admission.limits = AdmissionLimits(request_sequences=2)
    texts = {"text_input": ["x"] * (1 if pairs else 3)} | ({"text_pair": ["y"] * pairs} if pairs else {})
    tensors = {name: Tensor.from_strings(name, value) for name, value in texts.items()}
    request = InferenceRequest("bert", tensors, client="client")
    (response,) = [r async for r in core.model("bert").submit(request)]
    if pairs == 1:  # two texts to embed
        assert response.error is None
    else:
        assert isinstance(response.error, InvalidArgument)
        assert "3 sequences, at most 2 are allowed" in response.error.message
    assert not core.admission.sequences


async def test_text_and_pooling_interfaces(core):
    assert core.model("bert").language_model is None
    assert core.model("bert").pooling_model.pooling.dimensions == 48
    decoder = core.model("decoder")
    assert decoder.language_model is not None and decoder.pooling_model.pooling.kind == "last"


async def test_soft_prompts_as_tensors(core, checkpoints):
    llm = LLM(checkpoints["decoder"], runner="native", num_threads=1, num_blocks=32)
    table = (np.random.default_rng(0).standard_normal((3, 48)) * 0.3).astype(np.float32)
    from neso.generation import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=6)
    expected = [
        llm.generate(prompt, greedy, progress=False)[0].text
        for prompt in ({"prompt": "The quick", "prompt_embedding_table": table}, table)
    ]
    parameters = {"temperature": 0.0, "max_tokens": 6}
    size = np.array([3], np.int32)
    response = await infer(
        core,
        "decoder",
        parameters=parameters,
        text_input=["The quick"],
        prompt_embedding_table=table,
        prompt_vocab_size=size,
    )
    assert response.output("text_output").strings() == expected[:1]
    response = await infer(core, "decoder", parameters=parameters, text_input=[""], prompt_embeds=table)
    assert response.output("text_output").strings() == expected[1:]
    response = await infer(
        core, "decoder", text_input=["x"], prompt_embedding_table=table, prompt_vocab_size=size + 1
    )
    assert "prompt_vocab_size" in response.error.message
