"""Flags of `neso serve`: names, types, defaults, and the options that they set."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from serve_arguments import parse

from neso.cli.flag_values import OptionError
from neso.cli.serve_flags import FLAGS
from neso.flags import Flag
from neso.frontends.frontend_options import ResponseCompression
from neso.server.options import LogFormat, LogOptions, ModelControlMode, RateLimitMode, ResourceLimit

# All flags of tritonserver.
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

# A valid value of each kind that is not the default of any flag.
SAMPLES = {
    "TEXT": "x",
    "PATH|URI": "x",
    "PATH": "x",
    "INTEGER": "7",
    "NUMBER": "7.5",
    "true|false": "true",
    "LEVEL": "1",
}


def sample(flag: Flag) -> str:
    """Return the flag with a value other than its default."""
    if flag.kind.bare:
        return flag.option
    if flag.kind.metavar == "true|false" and flag.default is True:
        return f"{flag.option}=false"
    return f"{flag.option}={SAMPLES.get(flag.kind.metavar) or flag.kind.metavar.split('|')[-1]}"


def described(flag: Flag) -> str:
    """Return a line of serve_flags.txt: names, type of the value, default, marks."""
    hidden = flag.default is None or flag.kind.bare or flag.default_text
    default = "" if hidden else flag.kind.format(flag.default)
    marks = ["repeated"] * flag.repeated + ["ignored"] * bool(flag.ignored)
    return "; ".join([", ".join(flag.options), flag.value_name, default, " ".join(marks)]).rstrip("; ")


def test_names_types_and_defaults_are_stable():
    known = (Path(__file__).parent / "serve_flags.txt").read_text().splitlines()
    assert sorted(map(described, FLAGS)) == known


def test_all_flags_of_tritonserver_are_accepted():
    names = {name for flag in FLAGS for name in (flag.name, *flag.aliases)}
    assert set(TRITONSERVER) <= names


def test_names_are_unique():
    counts = Counter(option for flag in FLAGS for option in flag.options)
    assert [option for option, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("flag", [one for one in FLAGS if one.ignored], ids=lambda flag: flag.name)
def test_ignored_flag_warns_once(flag):
    repeats = 2 if flag.repeated else 1
    [warning] = parse(*[sample(flag)] * repeats).warnings
    assert warning == f"{flag.option} has no effect: {flag.ignored}"


@pytest.mark.parametrize("flag", [one for one in FLAGS if one.ignored], ids=lambda flag: flag.name)
def test_ignored_flag_with_its_default_does_not_warn(flag):
    if flag.default is not None:
        assert parse(f"{flag.option}={flag.kind.format(flag.default)}").warnings == ()


@pytest.mark.parametrize("text", ["true", "True", "on", "1"])
def test_spellings_of_true(text):
    assert parse(f"--allow-client-shm={text}").server.allow_client_shm


@pytest.mark.parametrize("text", ["false", "FALSE", "off", "0"])
def test_spellings_of_false(text):
    assert parse("--allow-http", text).http is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--http-port=http"], "--http-port: expected an integer, got 'http'"),
        (["--http-port=65536"], "--http-port: expected at most 65535"),
        (["--http-port=-1"], "--http-port: expected at least 0"),
        (["--http-port=1", "--http-port=2"], "--http-port: given more than once: 1, 2"),
        (["--exit-timeout-secs=soon"], "--exit-timeout-secs: expected a number"),
        (["--exit-timeout-secs=nan"], "--exit-timeout-secs: expected a finite number, got 'nan'"),
        (["--exit-timeout-secs=inf"], "--exit-timeout-secs: expected a finite number, got 'inf'"),
        (["--call-backlog-timeout-secs=1e9"], "--call-backlog-timeout-secs: expected at most 1000000"),
        (["--max-call-backlog=1000"], "--max-call-backlog: expected at least 1048576"),
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
def test_invalid_values(arguments, message):
    with pytest.raises(OptionError, match=message):
        parse(*arguments)


def test_addresses_default_to_the_http_address():
    options = parse("--http-address=127.0.0.1")
    assert options.metrics.host == options.openai.host == "127.0.0.1"
    assert options.grpc.host == "0.0.0.0"
    assert parse("--http-address=127.0.0.1", "--metrics-address=::1").metrics.host == "::1"


def test_host_is_the_default_address():
    options = parse("--host=127.0.0.1", "--port=8080")
    frontends = (options.http, options.grpc, options.metrics, options.openai)
    assert {frontend.host for frontend in frontends} == {"127.0.0.1"} and options.http.port == 8080
    options = parse("--host=127.0.0.1", "--http-address=::1", "--grpc-address=::")
    assert options.grpc.host == "::" and options.metrics.host == options.http.host == "::1"


def test_strict_model_config_disables_auto_complete():
    assert parse("--strict-model-config=true").server.disable_auto_complete_config
    assert not parse("--strict-model-config=false").server.disable_auto_complete_config
    assert parse("--disable-auto-complete-config").server.disable_auto_complete_config


def test_id_sets_the_server_id():
    assert parse("--id=left").server.server_id == "left"


@pytest.mark.parametrize(
    "arguments",
    [["--http-port=x"], ["--no-such-option=1"], ["--http-port"], ["--trace-config=rate=fast"]],
)
def test_invalid_command_line_exits_with_2(arguments):
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


def test_log_options():
    assert parse().log == LogOptions()
    switches = ("--log-info=false", "--log-warning=0", "--log-error=off")
    options = parse("--log-verbose=2", *switches, "--log-format=ISO8601", "--log-file=f").log
    assert options == LogOptions(False, False, False, 2, LogFormat.ISO8601, "f")
    assert parse("--log-verbose=true").log.verbose_level == 1
    assert parse("--log-verbose=false").log.verbose_level == 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--log-verbose=-1", "--log-verbose: expected at least 0, got -1"),
        ("--log-info=maybe", "--log-info: expected true or false, got 'maybe'"),
        ("--log-format=iso", "--log-format: expected default, ISO8601 or JSON, got 'iso'"),
    ],
)
def test_invalid_log_options(argument, message):
    with pytest.raises(OptionError, match=message):
        parse(argument)
