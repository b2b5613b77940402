"""Details of completions: echo, log probabilities, best_of, beams, truncated prompts, prompt embeddings."""

from __future__ import annotations

import base64
import io

import numpy as np
import openai
import pytest

from neso.generation import SamplingParams

MODEL = "neso-pilot"
QUESTION = "What is in-flight batching?"
PATH = "/v1/completions"


@pytest.fixture
def api(server):
    with openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0) as client:
        yield client


def complete(server, **fields):
    status, body = server.post(
        PATH, {"model": MODEL, "prompt": QUESTION, "temperature": 0, **fields}, "openai"
    )
    assert status == 200, body
    return body


def refused(server, **fields):
    status, body = server.post(PATH, {"model": MODEL, "prompt": QUESTION, **fields}, "openai")
    assert status == 400, body
    return body["error"]["param"]


LOGPROB_PATHS = [
    {},
    {"echo": True},
    {"n": 3, "temperature": 1.5, "seed": 5},
    {"echo": True, "n": 2, "temperature": 1.2, "seed": 1},
    {"best_of": 3, "n": 2, "temperature": 1.0, "seed": 2},
    {"stop": ["running batch"]},
    {"stop": ["atch a"]},  # starts and ends within tokens
    {"stop": ["atch a"], "include_stop_str_in_output": True},
    {"use_beam_search": True, "n": 2},
    {"prompt": "Grüße aus Köln ☃ 日本", "echo": True, "max_tokens": 4},
    {"prompt": [QUESTION, "What is TTFT?"], "echo": True},
    {"ignore_eos": True, "max_tokens": 60},
    {"echo": True, "max_tokens": 0},
    {"logit_bias": {"200": 100}, "max_tokens": 8},
    {"allowed_token_ids": [0xC3, 0xA4, 0xE2, 0x98, 0x83, 40, 50], "temperature": 1.0, "seed": 3},
]


@pytest.mark.parametrize("fields", LOGPROB_PATHS, ids=lambda fields: ",".join(fields))
def test_logprobs_match_the_text(server, fields):
    """Every token is at its `text_offset`, and whole and streamed responses agree."""
    fields = {"max_tokens": 24, "logprobs": 2, **fields}
    whole = complete(server, **fields)
    for choice in whole["choices"]:
        reported, text = choice["logprobs"], choice["text"]
        assert len({len(values) for values in reported.values()}) == 1
        offsets = reported["text_offset"]
        assert offsets == sorted(offsets)
        for token, offset, end in zip(reported["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
            if "\ufffd" not in token and not token.startswith("<|"):
                assert token.startswith(text[offset:end])
        assert all(0 <= len(top or {}) <= 3 for top in reported["top_logprobs"])
    assert streamed(server, fields) == [
        (choice["text"], choice["logprobs"], choice["finish_reason"]) for choice in whole["choices"]
    ]


def streamed(server, fields):
    """Return text, log probabilities and finish reason of each choice, joined from a stream."""
    with openai.OpenAI(base_url=server.url("/v1", "openai"), api_key="none", max_retries=0) as client:
        body = {"model": MODEL, "prompt": QUESTION, "temperature": 0, **fields}
        known = {name: body.pop(name) for name in ("model", "prompt")}
        chunks = list(client.completions.create(**known, stream=True, extra_body=body))
    found = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text, logprobs, _ = found.setdefault(choice.index, ["", {}, None])
            reported = choice.logprobs.model_dump()
            for name, values in reported.items():
                logprobs.setdefault(name, []).extend(values or [])
            tokens = "".join(logprobs["tokens"])
            if choice.finish_reason is None and "\ufffd" not in tokens and "<|" not in tokens:
                assert (text + choice.text).startswith(tokens)  # no token comes before its text
            found[choice.index] = [text + choice.text, logprobs, choice.finish_reason]
    return [tuple(found[index]) for index in sorted(found)]


def test_logprobs_equal_engine_logprobs(server, llm):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=2)
    (expected,) = llm.generate(QUESTION, params, progress=False)
    reported = complete(server, max_tokens=6, logprobs=2, echo=True)["choices"][0]["logprobs"]
    entries = [*expected.prompt_logprobs, *expected.outputs[0].logprobs]
    assert reported["tokens"][1:] == [entry.token for entry in entries[1:]]
    assert reported["token_logprobs"][0] is None
    assert reported["token_logprobs"][1:] == pytest.approx([entry.logprob for entry in entries[1:]], abs=1e-5)


def test_tokens_as_ids_and_token_ids(server, llm):
    (expected,) = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=5), progress=False)
    choice = complete(
        server, max_tokens=5, logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True
    )["choices"][0]
    ids = expected.outputs[0].token_ids
    assert choice["token_ids"] == ids
    assert choice["prompt_token_ids"] == expected.prompt_token_ids
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert set(choice["logprobs"]["top_logprobs"][0]) == {f"token_id:{ids[0]}"}


def test_prompt_logprobs(server, llm):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    (expected,) = llm.generate(QUESTION, params, progress=False)
    first, *rest = complete(server, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert first is None
    for reported, entry in zip(rest, expected.prompt_logprobs[1:], strict=True):
        own = reported[str(entry.token_id)]
        assert own["decoded_token"] == entry.token and own["rank"] == entry.rank
        assert own["logprob"] == pytest.approx(entry.logprob, abs=1e-5)
        assert len(reported) in (2, 3)
    assert refused(server, prompt_logprobs=1, stream=True) == "prompt_logprobs"


def test_best_of(server):
    best = complete(server, best_of=4, n=1, temperature=1.0, seed=1, max_tokens=8, logprobs=0)
    assert len(best["choices"]) == 1
    assert best["usage"]["completion_tokens"] > 8  # candidates that were not chosen count too
    several = complete(server, n=4, temperature=1.0, seed=1, max_tokens=8, logprobs=0)["choices"]

    def mean(choice):
        return np.mean(choice["logprobs"]["token_logprobs"])

    assert mean(best["choices"][0]) == pytest.approx(max(map(mean, several)), abs=1e-4)
    assert refused(server, best_of=1, n=2) == "best_of"


def test_beam_search(server, llm):
    params = SamplingParams(beam_width=3, n=3, max_tokens=8, length_penalty=0.7)
    (expected,) = llm.generate(QUESTION, params, progress=False)
    body = complete(server, temperature=1, use_beam_search=True, n=3, max_tokens=8, length_penalty=0.7)
    assert [choice["text"] for choice in body["choices"]] == [output.text for output in expected.outputs]
    one = complete(server, temperature=1, use_beam_search=True, max_tokens=8)["choices"][0]["text"]
    assert one == complete(server, max_tokens=8)["choices"][0]["text"]


def test_zero_max_tokens(server):
    body = complete(server, max_tokens=0, echo=True, logprobs=0)
    assert body["choices"][0]["text"] == QUESTION
    assert body["usage"]["completion_tokens"] == 0
    assert complete(server, max_tokens=0)["choices"][0]["text"] == ""


def test_truncated_prompt(server, llm):
    ids = llm.tokenizer.encode(QUESTION)[-3:]
    body = complete(server, truncate_prompt_tokens=3, max_tokens=4, return_token_ids=True, echo=True)
    choice = body["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert choice["text"].startswith(llm.tokenizer.decode(ids))
    long = complete(server, prompt="word " * 5000, truncate_prompt_tokens=-1, max_tokens=1)
    assert long["usage"]["prompt_tokens"] == 2047
    for keep in (0, 5000, -2):
        assert refused(server, truncate_prompt_tokens=keep) == "truncate_prompt_tokens"


def encoded(save):
    file = io.BytesIO()
    save(file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_prompt_embeds(server, llm, dtype):
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal((5, llm.info.hidden_size)).astype(np.float32)
    tensor = torch.from_numpy(values).to(getattr(torch, dtype))
    exact = tensor.float().numpy()
    (expected,) = llm.generate(exact, SamplingParams(temperature=0, max_tokens=6), progress=False)
    for text in (
        encoded(lambda file: torch.save(tensor, file)),
        encoded(lambda file: torch.save(tensor.t().contiguous().t(), file)),
        encoded(lambda file: np.save(file, exact)),
    ):
        body = complete(server, prompt=None, prompt_embeds=text, max_tokens=6)
        assert body["choices"][0]["text"] == expected.outputs[0].text
        assert body["usage"]["prompt_tokens"] == 5
    both = complete(server, prompt="Hi", prompt_embeds=[text], max_tokens=6)
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    assert both["choices"][0]["text"] == expected.outputs[0].text


def test_invalid_prompt_embeds(server):
    torch = pytest.importorskip("torch")
    bad = [
        "no base64!",
        base64.b64encode(b"something").decode(),
        base64.b64encode(b"PK something").decode(),
        encoded(lambda file: np.save(file, np.zeros((2, 3), np.float32))),
        encoded(lambda file: np.save(file, np.array([{}]), allow_pickle=True)),
        encoded(lambda file: torch.save({"a": torch.zeros(2)}, file)),
        encoded(lambda file: torch.save(torch.zeros(2, dtype=torch.int64), file)),
        encoded(lambda file: torch.save(print, file)),
    ]
    for text in bad:
        assert refused(server, prompt=None, prompt_embeds=text) == "prompt_embeds"
    assert refused(server, prompt=None) == "prompt"
    good = encoded(lambda file: np.save(file, np.zeros((2, 3), np.float32)))
    assert refused(server, prompt=None, prompt_embeds=good, echo=True) == "echo"


def test_stop_and_bad_words(server, llm):
    text = complete(server, max_tokens=30)["choices"][0]["text"]
    word = text.split()[3]
    assert word not in complete(server, max_tokens=30, bad_words=[word])["choices"][0]["text"]
    ids = llm.tokenizer.encode(" " + word, add_special_tokens=False)
    ended = complete(server, max_tokens=30, stop_words=[ids])["choices"][0]
    assert ended["finish_reason"] == "stop" and word not in ended["text"]
    only = complete(server, max_tokens=5, allowed_token_ids=[50, 51], return_token_ids=True)["choices"][0]
    assert set(only["token_ids"]) <= {50, 51}
    repeating = complete(
        server, max_tokens=40, no_repeat_ngram_size=1, allowed_token_ids=list(range(50, 95)), ignore_eos=True
    )
    assert repeating["usage"]["completion_tokens"] == 40


def test_usage_in_streams(api):
    chunks = list(
        api.completions.create(
            model=MODEL,
            prompt=QUESTION,
            max_tokens=4,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 4
    assert chunks[-1].choices == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"use_beam_search": True, "n": 2, "guided_choice": ["a"]}, "beam_width"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"embedding_bias": [0.0]}, "embedding_bias"),
        ({"embedding_bias": [1e300]}, "embedding_bias[0]"),
        ({"prompt": [10**6]}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"web_search_options": {"a": 1}}, "web_search_options"),
    ],
)
def test_rejected_parameters(server, fields, param):
    assert refused(server, **fields) == param
