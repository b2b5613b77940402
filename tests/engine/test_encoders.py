"""Encoders, compared with transformers in float32: embeddings, classifiers, rerankers."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from checkpoints import PAD, VOCAB_SIZE, make_encoder, rewrite_config
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from neso.engine.client.llm import LLM
from neso.engine.errors import EngineError
from neso.generation import InvalidParameter, PoolingParams, SamplingParams

RUNNERS = ["reference", "native", "torch"]
ARCHS = ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert"]
ATOL = 2e-5
RAW = PoolingParams(normalize=False)


@pytest.fixture(scope="session")
def encoder_factory(tmp_path_factory):
    made = {}

    def factory(arch="bert", **options):
        key = repr((arch, sorted(options.items())))
        if key not in made:
            made[key] = make_encoder(tmp_path_factory.mktemp(arch), arch, **options)
        return made[key]

    return factory


def prompts(seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(6, VOCAB_SIZE, length).tolist() for length in (1, 7, 64, 65, 120, 33)]


def oracle(directory, ids: list[int]) -> np.ndarray:
    """Return transformers' last hidden states of one sequence: float32[T, hidden]."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).last_hidden_state[0].numpy()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_mean_embeddings_equal_transformers(encoder_factory, arch, runner):
    directory = encoder_factory(arch)
    llm = LLM(directory, runner=runner)
    embeddings = llm.embed(prompts(), RAW)
    expected = [oracle(directory, ids).mean(axis=0) for ids in prompts()]
    np.testing.assert_allclose(embeddings, expected, atol=ATOL)
    # For any batch composition; with a budget of one token each runs in its own step.
    alone = LLM(directory, runner=runner, max_num_batched_tokens=1, max_num_seqs=1).embed(prompts(), RAW)
    np.testing.assert_allclose(embeddings, alone, atol=ATOL)


def test_only_the_native_runner_binds_threads(encoder_factory):
    directory = encoder_factory("bert")
    with pytest.raises(EngineError, match="thread_binding: node needs the native runner"):
        LLM(directory, runner="reference", thread_binding="node")
    bound = LLM(directory, runner="native", num_threads=2, thread_binding="node").embed(prompts(), RAW)
    np.testing.assert_array_equal(bound, LLM(directory, runner="native", num_threads=2).embed(prompts(), RAW))


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_activations(encoder_factory, activation, runner):
    directory = encoder_factory("bert", hidden_act=activation)
    embeddings = LLM(directory, runner=runner).embed(prompts(), RAW)
    expected = [oracle(directory, ids).mean(axis=0) for ids in prompts()]
    np.testing.assert_allclose(embeddings, expected, atol=ATOL)


@pytest.mark.parametrize("kind", ["mean", "cls", "last", "max"])
def test_pooling_types(encoder_factory, kind):
    directory = encoder_factory("bert")
    ids = prompts()[3]
    hidden = oracle(directory, ids)
    expected = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1], "max": hidden.max(0)}[kind]
    llm = LLM(directory, runner="native")
    np.testing.assert_allclose(
        llm.embed(ids, PoolingParams(pooling=kind, normalize=False))[0], expected, atol=ATOL
    )
    unit = expected / np.linalg.norm(expected)
    np.testing.assert_allclose(llm.embed(ids, PoolingParams(pooling=kind))[0], unit, atol=ATOL)
    cut = expected[:10] / np.linalg.norm(expected[:10])
    np.testing.assert_allclose(llm.embed(ids, PoolingParams(pooling=kind, dimensions=10))[0], cut, atol=ATOL)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_reranker_scores_equal_transformers(encoder_factory, arch, runner):
    directory = encoder_factory(arch, labels=1)
    llm = LLM(directory, runner=runner)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    documents = ["A server answers requests.", "Neso is a moon of Neptune", "def add"]
    expected = []
    for document in documents:
        ids, types = llm.tokenizer.encode_pair("What is Neso?", document)
        assert 1 in types
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
        if arch == "bert":
            inputs["token_type_ids"] = torch.tensor([types])
        with torch.no_grad():
            expected.append(model(**inputs).logits[0, 0].sigmoid().item())
    scores = llm.score("What is Neso?", documents)
    np.testing.assert_allclose(scores, expected, atol=ATOL)
    assert len(set(scores.tolist())) == 3


def test_class_probabilities_add_up_to_one(encoder_factory):
    directory = encoder_factory("roberta", labels=3)
    llm = LLM(directory, runner="native")
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    ids = llm.tokenizer.encode("The quick brown fox")
    with torch.no_grad():
        expected = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits.softmax(-1)[0]
    np.testing.assert_allclose(llm.classify("The quick brown fox")[0], expected, atol=ATOL)
    assert llm.info.pooling.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
    with pytest.raises(InvalidParameter, match="3 outputs"):
        llm.score("a", "b")


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "fields",
    [
        {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
        {"attention_bias": True, "mlp_bias": True, "hidden_activation": "gelu_new", "local_attention": 2},
    ],
)
def test_modernbert_options(encoder_factory, runner, fields):
    directory = encoder_factory("modernbert", labels=3, **fields)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    llm = LLM(directory, runner=runner)
    for ids in prompts():
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits.softmax(-1)[0]
        np.testing.assert_allclose(llm.classify([ids])[0], expected, atol=ATOL)


def test_old_modernbert_configs(encoder_factory, tmp_path):
    """As on the hub: a base of each rotation, and global attention in every n-th layer."""
    directory = encoder_factory("modernbert")
    old = shutil.copytree(directory, tmp_path / "old")
    thetas = {"global_rope_theta": 500.0, "local_rope_theta": 30.0}
    rewrite_config(old, remove=("rope_parameters", "layer_types"), global_attn_every_n_layers=2, **thetas)
    expected = [oracle(old, ids).mean(axis=0) for ids in prompts()]
    np.testing.assert_allclose(LLM(old, runner="native").embed(prompts(), RAW), expected, atol=ATOL)
    assert not np.allclose(expected, [oracle(directory, ids).mean(axis=0) for ids in prompts()], atol=1e-2)


def test_scores_without_a_classifier_are_cosine_similarities(encoder_factory):
    llm = LLM(encoder_factory("bert"), runner="reference")
    query, *documents = embeddings = llm.embed(["query", "one", "two"])
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(llm.score("query", ["one", "two"]), [d @ query for d in documents], atol=ATOL)
    with pytest.raises(InvalidParameter, match="classifier"):
        llm.classify("x")


def test_positions_of_roberta_skip_padding(encoder_factory):
    directory = encoder_factory("roberta")
    ids = [7, PAD, 8, 9]
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), attention_mask=torch.ones(1, 4)).last_hidden_state[0]
    embedding = LLM(directory, runner="reference").embed(ids, RAW)[0]
    np.testing.assert_allclose(embedding, hidden.mean(0), atol=ATOL)


def test_pooling_options_of_sentence_transformers(encoder_factory, tmp_path):
    directory = make_encoder(tmp_path, "bert")
    modules = ["Transformer", "Pooling", "Dense", "Normalize"]
    entries = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if not i else f"{i}_{name}",
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "1_Pooling").mkdir()
    mode = {"word_embedding_dimension": 48, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    (directory / "2_Dense").mkdir()
    dense = {"in_features": 48, "out_features": 20, "bias": True}
    dense["activation_function"] = "torch.nn.modules.activation.Tanh"
    (directory / "2_Dense" / "config.json").write_text(json.dumps(dense))
    weight, bias = torch.randn(20, 48), torch.randn(20)
    save_file({"linear.weight": weight, "linear.bias": bias}, directory / "2_Dense" / "model.safetensors")
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))
    llm = LLM(directory, runner="reference")
    ids = prompts()[1]
    expected = np.tanh(weight.numpy() @ oracle(directory, ids)[0] + bias.numpy())
    np.testing.assert_allclose(llm.embed(ids)[0], expected / np.linalg.norm(expected), atol=ATOL)
    assert (llm.info.pooling.dimensions, llm.info.pooling.kind, llm.info.max_model_len) == (20, "cls", 40)
    entries[2]["type"] = "sentence_transformers.models.WordWeights"
    (directory / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(EngineError, match="WordWeights"):
        LLM(directory, runner="reference")


@pytest.mark.parametrize("file", ["sentence_bert_config.json", "1_Pooling/config.json"])
def test_an_invalid_module_file_is_named(tmp_path, file):
    directory = make_encoder(tmp_path, "bert")
    pooling = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
    (directory / "modules.json").write_text(json.dumps([pooling]))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (directory / file).write_text("[]")
    with pytest.raises(EngineError, match=f"{file}: not a JSON object"):
        LLM(directory, runner="reference")


def test_tensor_names_of_legacy_checkpoints(encoder_factory, tmp_path):
    directory = make_encoder(tmp_path, "bert")
    before = LLM(directory, runner="reference").embed(prompts(), RAW)
    path = directory / "model.safetensors"
    renamed = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for name, t in load_file(path).items()
    }
    save_file(renamed, path)
    np.testing.assert_array_equal(LLM(directory, runner="reference").embed(prompts(), RAW), before)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["bfloat16", "int8"]
)
@pytest.mark.parametrize("arch", ["bert", "modernbert"])
def test_quantized_weights_are_close(encoder_factory, arch, options):
    directory = encoder_factory(arch, initializer_range=0.05)
    exact = LLM(directory, runner="reference").embed(prompts())
    close = LLM(directory, runner="native", **options).embed(prompts())
    assert np.einsum("ij,ij->i", exact, close).min() > 0.995


def test_lengths(encoder_factory):
    llm = LLM(encoder_factory("roberta"), runner="native")
    assert llm.info.max_model_len == 130 - PAD - 1
    with pytest.raises(InvalidParameter, match="at most 127"):
        llm.embed(list(range(6, 134)))
    (cut,) = llm.pool([list(range(6, 134))], RAW, truncate_prompt_tokens=-1)
    np.testing.assert_array_equal(cut.values, llm.embed(list(range(6, 133)), RAW)[0])
    ids, types = llm.tokenizer.encode_pair("a " * 60, "b " * 20, max_tokens=50)
    assert len(ids) == 50 and ids[-1] == 1
    # The shorter text is not truncated, and truncation does not affect later texts.
    assert sum(types) == len(llm.tokenizer.encode("b " * 20)) - 1
    assert len(llm.tokenizer.encode_pair("a " * 60)[0]) > 50
    num_special = len(llm.tokenizer.encode(""))
    assert num_special > 1
    for limit in range(1, num_special + 1):
        with pytest.raises(InvalidParameter, match="special tokens") as caught:
            llm.pool("a " * 60, RAW, truncate_prompt_tokens=limit)
        assert caught.value.field == "truncate_prompt_tokens"
    assert len(llm.tokenizer.encode_pair("a " * 60, max_tokens=num_special + 1)[0]) == num_special + 1


@pytest.mark.parametrize("arch", ["bert", "roberta"])
def test_truncation_keeps_a_token_of_the_text(encoder_factory, arch):
    llm = LLM(encoder_factory(arch), runner="reference")
    for prompt, num_special in (("a text", 2), (("a text", "and another"), 3)):
        for limit in range(1, num_special + 1):
            with pytest.raises(InvalidParameter, match=f"more than {num_special}") as caught:
                llm.pool([prompt], truncate_prompt_tokens=limit)
            assert caught.value.field == "truncate_prompt_tokens"
        (pooled,) = llm.pool([prompt], truncate_prompt_tokens=num_special + 1)
        assert pooled.num_prompt_tokens == num_special + 1
    ids, _ = llm.tokenizer.encode_pair("a text", add_special_tokens=False, max_tokens=1)
    assert len(ids) == 1


def test_encoders_reject_generation_and_invalid_requests(encoder_factory):
    llm = LLM(encoder_factory("bert"), runner="native")
    with pytest.raises(InvalidParameter, match="no LM head"):
        llm.generate("x", SamplingParams(), progress=False)
    with pytest.raises(InvalidParameter, match="dimensions"):
        llm.embed("x", PoolingParams(dimensions=49))
    with pytest.raises(InvalidParameter, match="at least 1"):
        PoolingParams(dimensions=0)
    with pytest.raises(InvalidParameter, match="vocabulary"):
        llm.embed([VOCAB_SIZE])
    with pytest.raises(InvalidParameter, match="empty"):
        llm.pool([[]])
