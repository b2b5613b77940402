"""Attacks with inputs that are small to send and expensive to read."""

from __future__ import annotations

import base64
import http.client
import io
import json
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attack import AttackedServer

pytestmark = pytest.mark.alone

PILOT = "neso-pilot"
WORDS = "one two three four five " * 210_000  # 5 MB
SECONDS_TO_REJECT = 0.5  # measured: 10 to 30 ms


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    """A server with the shipped model, as a language model and as an embedding model."""
    repository = tmp_path_factory.mktemp("repository")
    for name, backend in ((PILOT, "llm"), ("embedder", "embedding")):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.json").write_text(json.dumps({"model": PILOT, "num_blocks": 256}))
        (repository / name / "config.pbtxt").write_text(f'backend: "{backend}"')
    with AttackedServer("--model-control-mode=explicit", "--load-model=*", repository=repository) as running:
        yield running


def post(server: AttackedServer, port: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports[port], timeout=120)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


CHAT = [{"role": "user", "content": WORDS}]
LONG_PROMPTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "generate": ("http", f"/v2/models/{PILOT}/generate", {"text_input": WORDS}),
    "embedding tensors": (
        "http",
        "/v2/models/embedder/infer",
        {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [WORDS]}]},
    ),
    "completions": ("openai", "/v1/completions", {"model": PILOT, "prompt": WORDS}),
    "chat": ("openai", "/v1/chat/completions", {"model": PILOT, "messages": CHAT}),
    "responses": ("openai", "/v1/responses", {"model": PILOT, "input": WORDS}),
    "embeddings": ("openai", "/v1/embeddings", {"model": "embedder", "input": WORDS}),
    "rerank": ("openai", "/v1/rerank", {"model": "embedder", "query": "x", "documents": ["y", WORDS]}),
    "score": ("openai", "/v1/score", {"model": "embedder", "text_1": "x", "text_2": WORDS}),
    "tokenize": ("openai", "/tokenize", {"model": PILOT, "prompt": WORDS}),
}


@pytest.mark.parametrize("name", LONG_PROMPTS)
def test_long_prompts_are_rejected_without_tokenizing_them(server: AttackedServer, name: str) -> None:
    port, path, body = LONG_PROMPTS[name]
    data = json.dumps(body).encode()
    times: list[float] = []

    def attack() -> None:
        for _ in range(5):
            started = time.monotonic()
            status, answer = post(server, port, path, data)
            times.append(time.monotonic() - started)
            assert status == 400 and "tokens long" in json.dumps(answer), answer

    report = server.attack(attack, f"5 MB to {name}")
    print(f"{name}: rejected in {min(times) * 1e3:.0f} ms")
    assert min(times) < SECONDS_TO_REJECT
    report.check()


def test_truncated_prompts_of_any_length_are_accepted(server: AttackedServer) -> None:
    def attack() -> None:
        body = {"model": PILOT, "prompt": WORDS, "truncate_prompt_tokens": 8, "max_tokens": 1}
        status, answer = post(server, "openai", "/v1/completions", body)
        assert status == 200 and answer["usage"]["prompt_tokens"] == 8, answer
        body = {"model": "embedder", "input": WORDS, "truncate_prompt_tokens": 8}
        status, answer = post(server, "openai", "/v1/embeddings", body)
        assert status == 200 and answer["usage"]["prompt_tokens"] == 8, answer

    server.attack(attack, "5 MB with truncation").check()


def test_many_short_texts_do_not_block_the_event_loop(server: AttackedServer) -> None:
    texts = ["one two three four five " * 40] * 2048

    def attack() -> None:
        post(server, "openai", "/v1/embeddings", {"model": "embedder", "input": texts})
        post(server, "openai", "/v1/completions", {"model": PILOT, "prompt": texts, "max_tokens": 1})

    server.attack(attack, "2048 texts").check(limit_mib=200)


def test_bodies_of_many_values(server: AttackedServer) -> None:
    bodies = [
        ("/v1/completions", b'{"model":"neso-pilot","prompt":[' + b"1," * 1_000_000 + b'"a"]}'),
        ("/v1/completions", b'{"model":"neso-pilot","prompt":[' + b"[]," * 1_000_000 + b"[1]]}"),
        ("/v1/embeddings", b'{"model":"embedder","input":[' + b'"a",' * 1_000_000 + b"1]}"),
        (
            "/v1/chat/completions",
            b'{"model":"neso-pilot","messages":[' + b'{"role":"x"},' * 200_000 + b"{}]}",
        ),
    ]

    def attack() -> None:
        for path, body in bodies:
            status, answer = post(server, "openai", path, body)
            assert status == 400 and answer["error"]["message"], answer

    server.attack(attack, "a million values").check()


@pytest.mark.parametrize(
    ("element", "count"), [(b"[1]", 2_000_000), (b"[]", 2_000_000), (b"NaN", 1_000_000), (b'"a"', 1_000_000)]
)
def test_large_json_tensors(server: AttackedServer, element: bytes, count: int) -> None:
    start = b'{"inputs":[{"name":"text_input","datatype":"INT32","shape":[%d],"data":[' % count
    body = start + (element + b",") * (count - 1) + element + b"]}]}"

    def attack() -> None:
        status, answer = post(server, "http", "/v2/models/embedder/infer", body)
        assert status == 400 and answer["error"], answer

    server.attack(attack, f"{count} times {element.decode()}").check(limit_mib=300)


@pytest.mark.parametrize(
    ("datatype", "element", "count"),
    [("INT32", b"NaN", 490_000), ("BYTES", rb'"\n"', 490_000), ("INT32", b"[1]", 240_000)],
)
def test_json_within_the_limit_on_values(
    server: AttackedServer, datatype: str, element: bytes, count: int
) -> None:
    """Tensors that only the parsers in Python can read, of three clients at once."""
    start = b'{"inputs":[{"name":"text_input","datatype":"%b","shape":[%d],"data":[' % (
        datatype.encode(),
        count,
    )
    body = start + (element + b",") * (count - 1) + element + b"]}]}"

    def attack() -> None:
        with ThreadPoolExecutor(3) as pool:
            for status, answer in pool.map(
                lambda _: post(server, "http", "/v2/models/embedder/infer", body), range(3)
            ):
                assert status == 400 and answer["error"], answer

    server.attack(attack, f"{count} times {element.decode()}, 3 clients").check(limit_mib=300)


def test_prompts_within_the_limit_on_values(server: AttackedServer) -> None:
    body = b'{"model":"neso-pilot","prompt":[' + b"1," * 990_000 + b"1]}"

    def attack() -> None:
        with ThreadPoolExecutor(3) as pool:
            for status, answer in pool.map(
                lambda _: post(server, "openai", "/v1/completions", body), range(3)
            ):
                assert status == 400 and answer["error"]["message"], answer

    server.attack(attack, "990,000 tokens, 3 clients").check(limit_mib=300)


def test_large_nested_tensor(server: AttackedServer) -> None:
    """The lists of numpy's `tolist`, which are nested as the shape, are read without lists."""
    count = 2_000_000
    start = b'{"inputs":[{"name":"text_input","datatype":"INT32","shape":[%d,1],"data":[' % count
    body = start + b"[1]," * (count - 1) + b"[1]]}]}"

    def attack() -> None:
        status, answer = post(server, "http", "/v2/models/embedder/infer", body)
        assert status == 400 and "data-type is 'INT32'" in answer["error"], answer

    server.attack(attack, "2 million [1], nested as the shape").check()


def storage_bomb() -> bytes:
    """A file like that of `torch.save` whose metadata reads one storage of 5 MB 50 times."""

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x01tQ"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02(" + storage * 50 + b"t.")
        archive.writestr("a/data/0", bytes(5 << 20))
    return file.getvalue()


def test_prompt_embeddings_take_no_more_memory_than_their_file(server: AttackedServer) -> None:
    body = {"model": PILOT, "prompt_embeds": base64.b64encode(storage_bomb()).decode()}
    data = json.dumps(body).encode()

    def attack() -> None:
        with ThreadPoolExecutor(4) as pool:
            for status, answer in pool.map(
                lambda _: post(server, "openai", "/v1/completions", data), range(12)
            ):
                assert status == 400 and answer["error"]["param"] == "prompt_embeds", answer

    server.attack(attack, "storages read repeatedly").check(limit_mib=4 * 30)


def test_bodies_that_claim_large_tensors(server: AttackedServer) -> None:
    bodies: list[bytes] = [
        b'{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[0,4611686018427387904],"data":[]}]}',
        b'{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[%b],"data":["a"]}]}'
        % b",".join([b"1"] * 65),
        b'{"x": NaN, "y": ' + b"9" * 5000 + b"}",
        b'{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[1],"data":'
        + b"[" * 500
        + b'"a"'
        + b"]" * 500
        + b"}]}",
    ]

    def attack() -> None:
        for body in bodies * 20:
            status, answer = post(server, "http", "/v2/models/embedder/infer", body)
            assert status == 400 and answer["error"], answer

    server.attack(attack, "impossible shapes").check()


def test_configurations_cannot_name_files_outside_the_model(server: AttackedServer, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    depth = "../" * 12
    config = {
        "backend": "python",
        "default_model_filename": f"{depth}{tmp_path}/outside.py".replace("//", "/"),
    }
    parameters = {"config": json.dumps(config), "file:1/model.py": base64.b64encode(b"").decode()}
    status, answer = post(server, "http", "/v2/repository/models/sneaky/load", {"parameters": parameters})
    assert status == 400 and "must stay inside the version folder" in answer["error"], answer
    assert not (tmp_path / "ran").exists()
    deep = {"parameters": {"config": "{}", "file:" + "a/" * 2000 + "x": ""}}
    status, answer = post(server, "http", "/v2/repository/models/deep/load", deep)
    assert status == 400 and "folders" in answer["error"], answer


def test_concurrent_unloads_succeed(server: AttackedServer) -> None:
    for _ in range(3):
        results: list[int] = []

        def unload(results: list[int] = results) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=60)
            connection.request("POST", "/v2/repository/models/embedder/unload")
            results.append(connection.getresponse().status)
            connection.close()

        threads = [threading.Thread(target=unload) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [200, 200]
        connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=60)
        connection.request("POST", "/v2/repository/models/embedder/load")
        assert connection.getresponse().status == 200
        connection.close()
