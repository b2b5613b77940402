"""Inputs: synthetic prompts, files, traces and datasets."""

from __future__ import annotations

import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from neso.engine.text.tokenizer import Tokenizer
from neso.models import SHIPPED_MODELS
from neso.perf.errors import PerfError
from neso.perf.inputs import open_source, parse_extra_inputs
from neso.perf.inputs.lengths import Lengths, parse_length_mix
from neso.perf.inputs.options import InputOptions
from neso.perf.inputs.synthetic_text import SyntheticText, load_tokenizer
from neso.perf.inputs.tensors import TensorSource, TensorSpec
from neso.perf.requests import PerfRequest

PILOT = Tokenizer.from_directory(SHIPPED_MODELS["neso-pilot"])


def count(text: str) -> int:
    return len(PILOT.encode(text, add_special_tokens=False))


def requests(kind: str = "chat", **options) -> list[PerfRequest]:
    return list(open_source(InputOptions(**options), kind, ("neso-pilot",)).requests())


def byte_tokenizer(directory: Path) -> Tokenizer:
    """A vocabulary of bytes only, in which no word is one token."""
    vocabulary = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory / "tokenizer.json")


def unigram_tokenizer(directory: Path) -> Tokenizer:
    """A SentencePiece-like vocabulary with pieces that go over parts of words."""
    pieces = [
        ("<unk>", 0.0),
        *((f"▁{c}", -4.0) for c in "abcdefghijklmnopqrstuvwxyz"),
        ("▁", -3.0),
        ("▁th", -3.0),
    ]
    pieces += [(c, -5.0) for c in "abcdefghijklmnopqrstuvwxyz'.,!1\nI"] + [
        ("in", -3.5),
        ("er", -3.5),
        ("▁the", -2.0),
    ]
    backend = Backend(models.Unigram(pieces, 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


@given(tokens=st.integers(1, 300), prefix=st.integers(0, 20), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_synthetic_text_has_the_exact_number_of_tokens(tokens, prefix, seed):
    writer = SyntheticText(PILOT, np.random.default_rng(seed))
    start = writer.text(prefix)
    text = writer.text(prefix + tokens, after=start)
    assert text.startswith(start)
    assert count(text) == prefix + tokens


@pytest.mark.parametrize("make", [byte_tokenizer, unigram_tokenizer])
def test_exact_lengths_for_vocabularies_without_whole_words(make, tmp_path):
    writer = SyntheticText(make(tmp_path / "t"), np.random.default_rng(0))
    for tokens in (1, 2, 3, 7, 50, 333):
        assert writer.count(writer.text(tokens)) == tokens


def test_the_same_seed_gives_the_same_requests():
    options = {"input_tokens_mean": 20, "input_tokens_stddev": 8, "output_tokens_mean": 5, "num_entries": 8}
    assert requests(**options) == requests(**options)
    assert requests(**options) != requests(**options, random_seed=1)
    assert len({request.text for request in requests(**options)}) == 8


def test_requested_lengths_are_those_of_the_prompts():
    for request in requests(
        input_tokens_mean=30, input_tokens_stddev=10, output_tokens_mean=7, num_entries=20
    ):
        assert count(request.text) == request.input_tokens
        assert request.max_tokens == 7 and request.min_tokens is None
    (request,) = requests(output_tokens_mean=7, output_tokens_deterministic=True, num_entries=1)
    assert request.min_tokens == 7


def test_chat_template_is_part_of_the_length():
    options = {"input_tokens_mean": 60, "num_entries": 5, "apply_chat_template": True}
    for request in requests(**options):
        prompt = PILOT.apply_chat_template([{"role": "user", "content": request.text}])
        assert len(PILOT.encode(prompt, add_special_tokens=False)) == request.input_tokens == 60
    for request in requests("completions", **options):
        assert len(PILOT.encode(request.text)) == 60


def test_prefixes_are_shared_and_added_to_the_length():
    found = requests(input_tokens_mean=20, num_prefix_prompts=2, prefix_prompt_length=30, num_entries=20)
    assert all(count(request.text) == request.input_tokens == 50 for request in found)
    assert len({PILOT.decode(PILOT.encode(r.text, add_special_tokens=False)[:28]) for r in found}) == 2
    with pytest.raises(PerfError, match="together"):
        requests(num_prefix_prompts=2)


def test_shared_system_prompt_is_a_message_in_chats_and_a_prefix_in_completions():
    options = {"input_tokens_mean": 10, "shared_system_prompt_length": 15, "num_entries": 3}
    found = requests(**options)
    assert {count(request.system) for request in found} == {15} and len({r.system for r in found}) == 1
    completions = requests("completions", **options)
    assert all(request.system == "" and request.text.startswith(found[0].system) for request in completions)
    with pytest.raises(PerfError, match="only one"):
        requests(**options, system_prompt="x")


def test_sessions_have_turns_with_delays():
    found = requests(
        input_tokens_mean=5,
        num_sessions=4,
        session_turns_mean=3,
        session_turn_delay_mean=100,
        session_delay_ratio=0.5,
    )
    assert [(request.session, request.turn) for request in found] == [
        (f"session-{number}", turn) for number in range(4) for turn in range(3)
    ]
    assert {request.delay_ms for request in found if request.turn} == {50}
    assert {request.delay_ms for request in found if not request.turn} == {0}


def test_embeddings_and_rankings():
    (first, *_) = requests("embeddings", input_tokens_mean=6, batch_size_text=3)
    assert [count(text) for text in first.texts] == [6, 6, 6] and first.input_tokens == 18
    (first, *_) = requests("hf-tei-rankings", rankings_passages_mean=4, rankings_passage_tokens_mean=9)
    assert count(first.query) == 32 and [count(text) for text in first.passages] == [9] * 4


@pytest.mark.parametrize("format", ["png", "jpeg"])
def test_synthetic_images_have_their_size_and_format(format):
    found = requests("vision", image_width_mean=40, image_height_mean=25, image_format=format, num_entries=2)
    for request in found:
        (url,) = request.images
        head, data = url.split(",", 1)
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        assert head == f"data:image/{format};base64"
        assert (image.size, image.format.lower()) == ((40, 25), format)
    assert found[0].images != found[1].images
    with pytest.raises(PerfError, match="at most 100,000,000 pixels"):
        requests("vision", image_width_mean=20_000, image_height_mean=20_000)


@pytest.mark.parametrize(
    "text",
    [
        "256,128:40;512|20,256|10:60",
        "[(256,128):40,(512|20,256|10):60]",
        '{"pairs": [{"isl": 256, "osl": 128, "prob": 40},'
        ' {"isl": 512, "isl_stddev": 20, "osl": 256, "osl_stddev": 10, "prob": 60}]}',
    ],
)
def test_length_mixes(text):
    mix = parse_length_mix(text)
    assert mix.pairs == ((Lengths(256), Lengths(128)), (Lengths(512, 20), Lengths(256, 10)))
    assert mix.weights == (0.4, 0.6)
    rng = np.random.default_rng(0)
    share = np.mean([mix.sample(rng) == (256, 128) for _ in range(2000)])
    assert 0.35 < share < 0.45


@pytest.mark.parametrize(
    "text", ["", "256:40", "256,128:40", "a,b:100", "1.2.3,5:100", '{"pairs": [{}]}', "{"]
)
def test_invalid_length_mixes_are_rejected(text):
    with pytest.raises(PerfError, match="--seq-dist"):
        parse_length_mix(text)


@given(mean=st.floats(0, 1000), ratio=st.floats(0, 1), seed=st.integers(0, 100))
def test_uniform_lengths_stay_in_their_range(mean, ratio, seed):
    length = Lengths(mean, range_ratio=ratio).sample(np.random.default_rng(seed))
    assert max(1, round(mean * (1 - ratio))) - 1 <= length <= max(1, round(mean * (1 + ratio))) + 1


def write_lines(path: Path, *lines: object) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_single_turn_files(tmp_path):
    image = tmp_path / "dot.png"
    Image.new("RGB", (1, 1)).save(image)
    path = write_lines(
        tmp_path / "in.jsonl",
        {"text": "a", "output_length": 3, "timestamp": 500, "top_k": 5},
        "",
        {"text_input": "b", "image": "dot.png"},
        {"texts": ["c", "d"], "images": ["https://host/x.jpg"], "system": "s"},
        {"messages": [{"role": "user", "content": "e"}]},
        {"payload": {"prompt": "f"}},
    )
    a, b, c, e, f = requests(input_file=path)
    assert (a.text, a.max_tokens, a.timestamp_ms, a.extra) == ("a", 3, 500, {"top_k": 5})
    assert b.text == "b" and b.images[0].startswith("data:image/png;base64,")
    assert (c.text, c.images, c.system) == ("c\nd", ["https://host/x.jpg"], "s")
    assert e.messages == [{"role": "user", "content": "e"}] and f.payload == {"prompt": "f"}
    assert requests("embeddings", input_file=path)[2].texts == ["c", "d"]
    assert {one.max_tokens for one in requests(input_file=path, output_tokens_mean=9)} == {3, 9}


def test_multi_turn_files(tmp_path):
    path = write_lines(
        tmp_path / "in.jsonl",
        {"session_id": "x", "turns": [{"text": "a"}, {"text": "b", "delay": 200}]},
        {"session_id": "y", "turns": ["c"]},
    )
    found = requests(input_file=path, replay_speedup=2)
    assert [(r.session, r.turn, r.text, r.delay_ms) for r in found] == [
        ("x", 0, "a", 0),
        ("x", 1, "b", 100),
        ("y", 0, "c", 0),
    ]


def test_sampling_strategies(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", *({"text": str(i)} for i in range(20)))
    sequential, shuffled, drawn = (
        [int(r.text) for r in requests(input_file=path, sampling_strategy=name, num_entries=50)]
        for name in ("sequential", "shuffle", "random")
    )
    assert sequential == list(range(20))
    assert shuffled != sequential and sorted(shuffled) == sequential
    assert len(drawn) == 50 and set(drawn) <= set(range(20))


def test_folders_are_pools(tmp_path):
    write_lines(tmp_path / "queries.jsonl", {"text": "q1"}, {"text": "q2"})
    write_lines(tmp_path / "passages.jsonl", *({"text": f"p{i}"} for i in range(5)))
    ranking = requests("rankings", input_file=str(tmp_path), rankings_passages_mean=3, num_entries=4)
    assert len(ranking) == 4
    assert all(r.query[0] == "q" and len(r.passages) == 3 and r.passages[0][0] == "p" for r in ranking)
    combined = requests(input_file=str(tmp_path), num_entries=3)
    assert all(r.text.splitlines()[0][0] == "p" and r.text.splitlines()[1][0] == "q" for r in combined)


def test_inputs_json_is_sent_again(tmp_path):
    path = tmp_path / "inputs.json"
    path.write_text('{"data": [{"payload": [{"prompt": "a"}]}, {"payload": [{"n": 1}, {"n": 2}]}]}')
    found = requests(input_file=str(path))
    assert [r.payload for r in found] == [{"prompt": "a"}, {"n": 1}, {"n": 2}]
    assert [r.session for r in found] == ["", "session-1", "session-1"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "expected a JSON object"),
        ({"speech": 1}, "cannot use the line"),
        ({"text": "a", "text_input": "b"}, "cannot be in one line"),
        ({"text": "a", "image": "none.png"}, "none.png: No such file"),
        ({"text": "a", "output_length": "many"}, "invalid line"),
        ({"turns": 3}, "invalid line"),
        ({"input_length": 0}, "at least 1"),
        ({"input_length": "x"}, "invalid trace values"),
    ],
)
def test_invalid_lines_are_rejected_with_their_place(tmp_path, line, message):
    with pytest.raises(PerfError, match=message):
        requests(input_file=write_lines(tmp_path / "in.jsonl", line))


def test_missing_and_empty_files_are_rejected(tmp_path):
    with pytest.raises(PerfError, match="no such file"):
        requests(input_file=str(tmp_path / "none"))
    with pytest.raises(PerfError, match="no requests"):
        requests(input_file=write_lines(tmp_path / "empty.jsonl"))
    with pytest.raises(PerfError, match=r"no \.jsonl files"):
        (tmp_path / "folder").mkdir()
        requests(input_file=str(tmp_path / "folder"))
    with pytest.raises(PerfError, match="cannot be combined"):
        requests(input_file="a", input_dataset="b")


def test_mooncake_traces_share_prefixes_by_hash_id(tmp_path):
    path = write_lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 3000, "input_length": 45, "output_length": 4, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 40, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 2000, "input_length": 12, "output_length": 1, "hash_ids": [9]},
    )
    first, second, third = requests(input_file=path, trace_block_size=20)
    assert [r.timestamp_ms for r in (first, second, third)] == [0, 1000, 2000]
    assert [count(r.text) for r in (first, second, third)] == [40, 12, 45]
    assert [r.max_tokens for r in (first, second, third)] == [2, 1, 4]
    ids = [PILOT.encode(r.text, add_special_tokens=False) for r in (first, second, third)]
    assert ids[0][:20] == ids[2][:20] and ids[0][:5] != ids[1][:5]
    assert third.text.startswith(first.text[:50])


def test_schedule_window_and_speedup(tmp_path):
    lines = [{"timestamp": 1000 * i, "input_length": 5} for i in range(10)]
    path = write_lines(tmp_path / "trace.jsonl", *lines)
    found = requests(input_file=path, schedule_start_ms=2000, schedule_end_ms=5000, replay_speedup=2)
    assert [r.timestamp_ms for r in found] == [0, 500, 1000, 1500]
    with pytest.raises(PerfError, match="no request between"):
        requests(input_file=path, schedule_start_ms=20000)


def test_azure_and_burst_gpt_traces(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,20,4\n2023-11-16 18:17:04.0319600,30,5\n"
    )
    found = requests(input_file=str(azure))
    assert [(count(r.text), r.max_tokens) for r in found] == [(20, 4), (30, 5)]
    assert [r.timestamp_ms for r in found] == pytest.approx([0, 52], abs=0.01)
    burst = tmp_path / "burst.csv"
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,15,3,18,Conversation log\n45,ChatGPT,9,0,9,API log\n118,GPT-4,7,2,9,API log\n"
    )
    found = requests(input_file=str(burst), replay_speedup=10)
    assert [(count(r.text), r.max_tokens, r.timestamp_ms) for r in found] == [(15, 3, 0), (7, 2, 11300)]
    with pytest.raises(PerfError, match="expected the columns"):
        requests(input_file=str(burst), input_file_type="azure_trace")


def test_extra_inputs():
    assert parse_extra_inputs(["ignore_eos:true", "temperature:0.5", "user:me", '{"a": {"b": 1}}']) == {
        "ignore_eos": True,
        "temperature": 0.5,
        "user": "me",
        "a": {"b": 1},
    }
    assert requests(extra_inputs=("top_k:3",), num_entries=1)[0].extra == {"top_k": 3}
    for text in ("nothing", ":1", "{"):
        with pytest.raises(PerfError, match="--extra-inputs"):
            parse_extra_inputs([text])


def test_missing_tokenizers_are_an_error_and_an_unknown_model_a_warning(tmp_path, caplog):
    with pytest.raises(PerfError, match="--tokenizer"):
        requests(tokenizer=str(tmp_path))
    source = open_source(InputOptions(num_entries=1, input_tokens_mean=5), "chat", (str(tmp_path),))
    assert len(list(source.requests())) == 1
    assert "counted by the tokenizer of neso-pilot" in caplog.text


ROWS = {
    "default/train": [
        {"system_prompt": "Be brief.", "question": f"Question {i}?", "response": "one two three"}
        for i in range(150)
    ],
    "chats/test": [{"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "hello"}]}],
}


class DatasetServer(BaseHTTPRequestHandler):
    """Answers as the hub's dataset server does."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if query["dataset"] == "none/there":
            self.send_error(404)
            return
        if parts.path == "/splits":
            names = [name.split("/") for name in ROWS]
            body: object = {"splits": [{"config": config, "split": split} for config, split in names]}
        else:
            start, length = int(query["offset"]), int(query["length"])
            rows = ROWS[f"{query['config']}/{query['split']}"][start : start + length]
            body = {"rows": [{"row": row} for row in rows]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def dataset_server(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), DatasetServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("NESO_DATASETS_SERVER", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def test_datasets_by_name_and_by_column(dataset_server):
    found = requests(input_dataset="openorca", num_entries=120)
    assert len(found) == 120
    assert (found[101].text, found[101].system) == ("Question 101?", "Be brief.")
    assert found[0].max_tokens == count("one two three") and found[0].input_tokens == count("Question 0?")
    (chat,) = requests(input_dataset="any/chats", dataset_subset="chats")
    assert chat.text == "hello" and chat.max_tokens is None
    found = requests(input_dataset="any/one", dataset_prompt_column="response", num_entries=2)
    assert [r.text for r in found] == ["one two three"] * 2


def test_errors_of_datasets(dataset_server, monkeypatch):
    with pytest.raises(PerfError, match="the hub answers 404"):
        requests(input_dataset="none/there")
    with pytest.raises(PerfError, match="no column 'answer'; there are system_prompt, question, response"):
        requests(input_dataset="any/one", dataset_prompt_column="answer")
    with pytest.raises(PerfError, match="no such subset or split; there are default/train, chats/test"):
        requests(input_dataset="any/one", dataset_split="validation")
    monkeypatch.setenv("NESO_DATASETS_SERVER", "http://127.0.0.1:9")
    with pytest.raises(PerfError, match="cannot be reached"):
        requests(input_dataset="openorca")


SPECS = (
    TensorSpec("IDS", "INT64", (-1, 4)),
    TensorSpec("TEXT", "BYTES", (-1, 1)),
    TensorSpec("MASK", "FP32", (-1, -1)),
)


def tensor_requests(**options) -> list[dict[str, np.ndarray]]:
    source = TensorSource(SPECS, InputOptions(tensor_shapes=("MASK:3",), **options), max_batch_size=8)
    return [request.tensors for request in source.requests()]


def test_tensors_have_the_shapes_and_types_of_the_metadata():
    first, second = tensor_requests(num_entries=2, batch_size_text=2, string_length=5)
    assert {name: (array.shape, array.dtype.name) for name, array in first.items()} == {
        "IDS": ((2, 4), "int64"),
        "TEXT": ((2, 1), "object"),
        "MASK": ((2, 3), "float32"),
    }
    assert len(first["TEXT"][0, 0]) == 5 and not np.array_equal(first["IDS"], second["IDS"])
    (zero,) = tensor_requests(tensor_data="zero", string_data="hi")
    assert not zero["IDS"].any() and zero["TEXT"].tolist() == [[b"hi"]]


def test_tensors_of_a_perf_analyzer_file(tmp_path):
    path = tmp_path / "data.json"
    step = {"IDS": [1, 2, 3, 4], "TEXT": ["é"], "MASK": {"content": [0.5, 1, 2], "shape": [3]}}
    raw = base64.b64encode(np.arange(4, dtype=np.int64).tobytes()).decode()
    path.write_text(json.dumps({"data": [step, [{**step, "IDS": {"b64": raw}}, step]]}))
    source = TensorSource(SPECS, InputOptions(tensor_shapes=("MASK:3",), tensor_data=str(path)), 8)
    one, two, three = source.requests()
    assert one.tensors["TEXT"].tolist() == [["é".encode()]]
    assert one.tensors["MASK"].tolist() == [[0.5, 1, 2]]
    assert two.tensors["IDS"].tolist() == [[0, 1, 2, 3]]
    assert [(r.session, r.turn) for r in (one, two, three)] == [("", 0), ("session-1", 0), ("session-1", 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_shapes": ("MASK:x",)}, "expected NAME"),
        ({"tensor_shapes": ("NONE:3",)}, "no input NONE"),
        ({"tensor_shapes": ("IDS:5", "MASK:3")}, "does not fit"),
        ({"tensor_shapes": ()}, "give the dimensions by --shape MASK"),
        ({"tensor_shapes": ("MASK:3",), "batch_size_text": 9}, "at most 8"),
        ({"tensor_shapes": ("MASK:3",), "tensor_data": "missing.json"}, "expected random, zero or a file"),
    ],
)
def test_invalid_tensor_options_are_rejected(options, message):
    with pytest.raises(PerfError, match=message):
        list(TensorSource(SPECS, InputOptions(**options), 8).requests())
