"""The table of options: complete, without clashes, and true to what it says of each."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from serve_arguments import parse

from neso.cli.options import OPTIONS
from neso.cli.options.errors import OptionError
from neso.frontends.kserve.grpc_options import ResponseCompression
from neso.server.options import ModelControlMode
from neso.server.rate_limiter.options import RateLimitMode, ResourceLimit

# What tritonserver's command line has.
TRITONSERVER = """
allow-client-shm allow-cpu-metrics allow-gpu-metrics allow-grpc allow-http allow-metrics allow-sagemaker
allow-vertex-ai backend-config backend-directory buffer-manager-thread-count cache-config cache-directory
cuda-memory-pool-byte-size cuda-virtual-address-size disable-auto-complete-config enable-peer-access exit-on-error
exit-timeout-secs grpc-address grpc-header-forward-pattern grpc-http2-max-ping-strikes
grpc-http2-max-pings-without-data grpc-http2-min-recv-ping-interval-without-data grpc-infer-allocation-pool-size
grpc-infer-response-compression-level grpc-infer-thread-count grpc-keepalive-permit-without-calls grpc-keepalive-time
grpc-keepalive-timeout grpc-max-connection-age grpc-max-connection-age-grace grpc-max-response-pool-size grpc-port
grpc-restricted-protocol grpc-root-cert grpc-server-cert grpc-server-key grpc-use-ssl grpc-use-ssl-mutual host-policy
http-address http-header-forward-pattern http-max-input-size http-port http-restricted-api http-thread-count id
load-model log-error log-file log-format log-info log-verbose log-warning metrics-address metrics-config
metrics-interval-ms metrics-port min-supported-compute-capability model-config-name model-control-mode
model-load-gpu-limit model-load-retry-count model-load-thread-count model-namespacing model-repository model-store
pinned-memory-pool-byte-size rate-limit rate-limit-resource repoagent-directory repository-poll-secs
response-cache-byte-size reuse-grpc-port reuse-http-port sagemaker-port sagemaker-safe-port-range
sagemaker-thread-count strict-model-config strict-readiness trace-config trace-count trace-file trace-level
trace-log-frequency trace-rate vertex-ai-default-model vertex-ai-port vertex-ai-thread-count
""".split()

# A value that each kind takes and that is not the default of any option of it.
SAMPLES = {
    "TEXT": "x",
    "PATH|URI": "x",
    "PATH": "x",
    "INTEGER": "7",
    "NUMBER": "7.5",
    "true|false": "true",
    "LEVEL": "1",
}


def sample(option) -> str:
    """The option with a value that has to have an effect."""
    if option.kind.bare:
        return option.flag
    if option.kind.metavar == "true|false" and option.default is True:
        return f"{option.flag}=false"
    return f"{option.flag}={SAMPLES.get(option.kind.metavar) or option.kind.metavar.split('|')[-1]}"


def test_all_of_tritonserver_are_there():
    flags = {flag.removeprefix("--") for option in OPTIONS for flag in option.flags}
    assert set(TRITONSERVER) <= flags


def test_no_name_is_taken_twice():
    counts = Counter(flag for option in OPTIONS for flag in option.flags)
    assert [flag for flag, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.ignored], ids=lambda option: option.name)
def test_what_has_no_effect_is_said_once(option):
    repeats = 2 if option.repeated else 1
    [warning] = parse(*[sample(option)] * repeats).warnings
    assert warning == f"{option.flag} has no effect: {option.ignored}"


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.ignored], ids=lambda option: option.name)
def test_the_default_may_be_written_out(option):
    if option.default is not None:
        assert parse(f"{option.flag}={option.kind.written(option.default)}").warnings == ()


@pytest.mark.parametrize("text", ["true", "True", "on", "1"])
def test_true(text):
    assert parse(f"--allow-client-shm={text}").server.allow_client_shm


@pytest.mark.parametrize("text", ["false", "FALSE", "off", "0"])
def test_false(text):
    assert parse("--allow-http", text).http is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--http-port=http"], "--http-port: expected a whole number, got 'http'"),
        (["--http-port=65536"], "--http-port: expected at most 65535"),
        (["--http-port=-1"], "--http-port: expected at least 0"),
        (["--http-port=1", "--http-port=2"], "--http-port: given more than once: 1, 2"),
        (["--exit-timeout-secs=soon"], "--exit-timeout-secs: expected a number"),
        (["--exit-timeout-secs=nan"], "--exit-timeout-secs: expected at least 0"),
        (["--strict-readiness=maybe"], "--strict-readiness: expected true or false, got 'maybe'"),
        (["--model-control-mode=on"], "expected none, explicit or poll, got 'on'"),
        (["--grpc-port=8000"], "HTTP requests and gRPC requests at the same address and port 0.0.0.0:8000"),
        (["--openai-port=8002"], "metrics requests and OpenAI requests at the same address and port"),
        (["--backend-config=x"], "--backend-config: expected BACKEND,KEY=VALUE, got 'x'"),
        (
            ["--model-control-mode=explicit", "--load-model=*", "--load-model=a"],
            r"Wildcard model name '\*' must be the ONLY startup model",
        ),
        (["--load-model=a"], "startup models can be named in model control mode 'explicit' only"),
    ],
)
def test_bad_values(arguments, message):
    with pytest.raises(OptionError, match=message):
        parse(*arguments)


def test_addresses_follow_that_of_http():
    options = parse("--http-address=127.0.0.1")
    assert options.metrics.host == options.openai_http.host == "127.0.0.1"
    assert options.grpc.host == "0.0.0.0"
    assert parse("--http-address=127.0.0.1", "--metrics-address=::1").metrics.host == "::1"


def test_host_is_that_of_all():
    options = parse("--host=127.0.0.1", "--port=8080")
    places = (options.http, options.grpc, options.metrics, options.openai_http)
    assert {place.host for place in places} == {"127.0.0.1"} and options.http.port == 8080
    options = parse("--host=127.0.0.1", "--http-address=::1", "--grpc-address=::")
    assert options.grpc.host == "::" and options.metrics.host == options.http.host == "::1"


def test_strict_model_config_is_the_old_name():
    assert parse("--strict-model-config=true").server.disable_auto_complete_config
    assert not parse("--strict-model-config=false").server.disable_auto_complete_config
    assert parse("--disable-auto-complete-config").server.disable_auto_complete_config


def test_id_names_the_server():
    assert parse("--id=left").server.server_id == "left"


@pytest.mark.parametrize(
    "arguments",
    [["--http-port=x"], ["--no-such-option=1"], ["--http-port"], ["--trace-config=rate=fast"]],
)
def test_bad_command_lines_end_with_2(arguments):
    result = subprocess.run(
        [sys.executable, "-m", "neso.cli", "serve", *arguments], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert arguments[0].split("=")[0] in result.stderr and "Traceback" not in result.stderr


def test_model_management():
    server = parse(
        "--model-repository=local",
        "--model-store=s3://bucket/models",
        "--model-control-mode=poll",
        "--repository-poll-secs=2",
        "--model-config-name=gpu",
        "--model-namespacing=true",
        "--model-load-thread-count=2",
        "--model-load-retry-count=3",
    ).server
    assert server.model_repository == (Path("local"), "s3://bucket/models")
    assert server.model_control_mode is ModelControlMode.POLL and server.repository_poll_secs == 2
    assert (server.model_config_name, server.model_namespacing) == ("gpu", True)
    assert (server.model_load_thread_count, server.model_load_retry_count) == (2, 3)


def test_grpc_options():
    grpc = parse(
        "--grpc-keepalive-time=1",
        "--grpc-keepalive-timeout=2",
        "--grpc-keepalive-permit-without-calls=1",
        "--grpc-http2-min-recv-ping-interval-without-data=3",
        "--grpc-http2-max-ping-strikes=4",
        "--grpc-max-connection-age=5",
        "--grpc-max-connection-age-grace=6",
        "--grpc-infer-response-compression-level=high",
        "--reuse-grpc-port=true",
    ).grpc
    assert (grpc.keepalive_time_ms, grpc.keepalive_timeout_ms, grpc.keepalive_permit_without_calls) == (
        1,
        2,
        True,
    )
    assert (grpc.http2_min_recv_ping_interval_without_data_ms, grpc.http2_max_ping_strikes) == (3, 4)
    assert (grpc.max_connection_age_ms, grpc.max_connection_age_grace_ms) == (5, 6)
    assert grpc.response_compression is ResponseCompression.high and grpc.reuse_port


def test_rate_limiter():
    server = parse(
        "--rate-limit=execution_count", "--rate-limit-resource=R1:4", "--rate-limit-resource=R2:2:1"
    ).server
    assert server.rate_limit is RateLimitMode.EXECUTION_COUNT
    assert server.rate_limit_resources == (ResourceLimit("R1", 4), ResourceLimit("R2", 2, 1))
    with pytest.raises(OptionError, match="--rate-limit-resource option format is"):
        parse("--rate-limit-resource=R1")
