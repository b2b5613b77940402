"""The command line without a server: its output and its options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from serve_arguments import parse
from typer.testing import CliRunner

import neso
from neso.cli.flag_values import OptionError
from neso.cli.main import app
from neso.cli.serve_options import ModelArgument
from neso.engine.config import EngineConfig
from neso.server.cache_options import RedisOptions
from neso.server.options import ModelControlMode


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "neso.cli", *arguments], capture_output=True, text=True)


def test_version():
    assert run("--version").stdout == f"neso {neso.__version__}\n"


def test_help_has_topics():
    text = run("serve", "--help").stdout
    for group in ("Models", "Engine", "HTTP", "gRPC", "Metrics", "Process", "Logging", "Rate limiter"):
        assert f"─ {group}" in text
    for option in (
        "--model-repository",
        "--model-control-mode",
        "--http-port",
        "--grpc-port",
        "--exit-timeout",
    ):
        assert option in text


@pytest.mark.parametrize("arguments", [["--version"], ["serve", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys\n"
        f"sys.argv = ['neso', *{arguments}]\n"
        "from neso.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('numpy', 'grpc', 'fastapi', 'tokenizers', 'yaml') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith(
        "[]\n"
    )


def test_package_imports_nothing_heavy():
    code = "import sys, neso; print('numpy' in sys.modules, 'torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"
    )


@pytest.mark.parametrize(
    ("text", "name", "checkpoint"),
    [
        ("neso-pilot", "neso-pilot", "neso-pilot"),
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("chat=Qwen/Qwen3-0.6B", "chat", "Qwen/Qwen3-0.6B"),
        ("/models/llama", "llama", "/models/llama"),
        ("/models/tiny-Q8_0.gguf", "tiny-Q8_0", "/models/tiny-Q8_0.gguf"),
    ],
)
def test_model_argument(text, name, checkpoint):
    assert ModelArgument.parse(text) == ModelArgument(name, checkpoint)


def test_model_argument_of_a_directory_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ModelArgument.parse(".").name == tmp_path.name


@pytest.mark.parametrize("text", ["=x", "x=", ""])
def test_invalid_model_argument(text):
    with pytest.raises(OptionError, match="NAME=CHECKPOINT"):
        ModelArgument.parse(text)


def test_defaults():
    options = parse()
    assert [m.name for m in options.models] == ["neso-pilot"]
    assert options.http and options.grpc and options.metrics and options.openai
    ports = (options.http.port, options.grpc.port, options.metrics.port, options.openai.port)
    assert ports == (8000, 8001, 8002, 9000)
    assert not options.server.exit_on_error and options.server.strict_readiness
    assert not options.server.allow_client_shm


def test_options_reach_server_and_frontends(tmp_path):
    options = parse(
        f"--model-repository={tmp_path}",
        "--model-control-mode=explicit",
        "--load-model=a",
        "--load-model=b",
        "--strict-readiness=false",
        "--allow-grpc=false",
        "--backend-config=llm,in-process=true",
        "--exit-timeout-secs=5",
        "--http-port=1234",
    )
    assert options.models == ()
    assert options.server.model_repository == (tmp_path,)
    assert options.server.model_control_mode is ModelControlMode.EXPLICIT
    assert options.server.startup_models == ("a", "b")
    assert options.server.backend_config == {"llm": {"in-process": "true"}}
    assert options.server.exit_timeout == 5 and not options.server.strict_readiness
    assert options.grpc is None and options.http is not None and options.http.port == 1234


def test_engine_options():
    options = parse("m=neso-pilot", "--max-model-len=512", "--max-num-seqs=4")
    assert options.engine == {"max_model_len": "512", "max_num_seqs": "4"}


def test_lora_and_speculation_options_reach_the_engine():
    options = parse(
        "neso-pilot",
        "--enable-lora",
        "--max-loras=4",
        "--lora-modules=sql=adapters/sql",
        "--lora-modules=poems=adapters/poems",
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 4}',
        "--engine-config=block_size=32",
        "--engine-config=enable_prefix_caching=false",
    )
    engine = EngineConfig.from_options("x", dict(options.engine))
    assert engine.lora.enable_lora and engine.lora.max_loras == 4
    assert engine.lora.lora_modules == {"sql": "adapters/sql", "poems": "adapters/poems"}
    assert engine.speculation.speculative == "ngram" and engine.speculation.num_speculative_tokens == 4
    assert engine.scheduler.block_size == 32 and not engine.scheduler.enable_prefix_caching


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora-modules=sql"], "--lora-modules: expected NAME=PATH, got 'sql'"),
        (["--lora-modules=a=x", "--lora-modules=a=y"], "--lora-modules: 'a' is given twice"),
        (["--engine-config=block_size"], "--engine-config: expected KEY=VALUE, got 'block_size'"),
        (
            ["--max-num-seqs=4", "--engine-config=max_num_seqs=8"],
            "--engine-config: 'max_num_seqs' is given twice",
        ),
        (["--speculative-config=ngram"], "--speculative-config: expected a JSON object"),
        (["--speculative-config=[]"], r"--speculative-config: expected a JSON object, got '\[\]'"),
    ],
)
def test_invalid_engine_options(arguments, message):
    with pytest.raises(OptionError, match=message):
        parse("neso-pilot", *arguments)


def test_served_model_name():
    (model,) = parse("org/model", "--served-model-name=chat").models
    assert model == ModelArgument("chat", "org/model")
    with pytest.raises(OptionError, match="a single MODEL"):
        parse("a", "b", "--served-model-name=chat")
    with pytest.raises(OptionError, match="expected CHECKPOINT or NAME=CHECKPOINT"):
        parse("a", "--served-model-name=")


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ([], 0),
        (["--cache-config=local,size=1048576"], 1 << 20),
        (["--cache-config", "local,size=5"], 5),
        (["--response-cache-byte-size=7"], 7),
    ],
)
def test_response_cache_size(arguments, size):
    assert parse(*arguments).server.response_cache_size == size


def test_redis_cache():
    server = parse("--cache-config=redis,host=cache", "--cache-config=redis,port=6379").server
    assert server.redis_cache == RedisOptions("cache", 6379) and not server.response_cache_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache-config=redis,host=x"], "'port' is missing"),
        (["--cache-config=local,size=1G"], "'local,size=1G': expected a number"),
        (["--cache-config=local"], "expected local,KEY=VALUE"),
        (["--cache-config=local,size=1", "--response-cache-byte-size=1"], "cannot be given together"),
    ],
)
def test_invalid_cache_config(arguments, message):
    with pytest.raises(OptionError, match=message):
        parse(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--join is required"),
        (("--join=tcp://127.0.0.1:1",), "needs a file with a token"),
        (("--join=ipc://x", "--engine-config=workers=1"), "a worker has one engine"),
    ],
)
def test_options_of_a_worker_are_checked(options, message):
    result = CliRunner().invoke(app, ["worker", *options])
    assert (result.exit_code, message in result.stderr) == (2, True), result.output
