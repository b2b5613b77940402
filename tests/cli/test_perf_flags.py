"""The command line of `neso perf profile`, and those of genai-perf, perf_analyzer and aiperf."""

from __future__ import annotations

import shlex

import pytest
import typer

from neso.cli.flag_values import FlagValues, OptionError
from neso.cli.perf import normalized
from neso.cli.perf_flags import FLAGS, REFUSED, TOPICS
from neso.perf.client.generator import load_name
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.inputs.options import InputOptions
from neso.perf.load.options import LoadOptions
from neso.perf.load.plan import Arrival
from neso.perf.output_options import OutputOptions


def parse(line: str) -> tuple[EndpointOptions, LoadOptions, InputOptions, OutputOptions]:
    names = {option: flag for flag in FLAGS for option in flag.options}
    texts: dict[str, list[str]] = {}
    rest = normalized(shlex.split(line))
    while rest:
        name, separator, value = rest.pop(0).partition("=")
        flag = names[name]
        if not separator:
            value = "true" if flag.kind.bare else rest.pop(0)
        texts.setdefault(flag.name, []).append(value)
    values = FlagValues.read(FLAGS, texts)
    return (
        values.build(EndpointOptions),
        values.build(LoadOptions),
        values.build(InputOptions),
        values.build(OutputOptions),
    )


def test_every_option_has_one_name():
    options = [option for flag in FLAGS for option in flag.options]
    assert len(options) == len(set(options)) > 100
    assert not {f"--{name}" for name in REFUSED} & set(options)
    assert all(flag.help.endswith(".") for flags in TOPICS.values() for flag in flags)


def test_a_command_line_of_genai_perf_in_2024():
    endpoint, load, inputs, output = parse(
        "-m base lora_a lora_b --service-kind openai --endpoint-type chat --streaming -u localhost:9000 "
        "--model-selection-strategy random --synthetic-input-tokens-mean 200 --synthetic-input-tokens-stddev 10 "
        "--output-tokens-mean 100 --concurrency 50 --measurement-interval 4000 --goodput "
        "time_to_first_token:100 inter_token_latency:20 --extra-inputs ignore_eos:true -- -v --max-threads=2 --async"
    )
    assert endpoint.models == ("base", "lora_a", "lora_b") and endpoint.model_selection == "random"
    assert endpoint.endpoint_type == "chat" and endpoint.streaming and endpoint.urls == ("localhost:9000",)
    [(plan, warm_up)] = load.loads()
    assert (
        plan.concurrency == 50 and plan.window_seconds == 4 and plan.stable_percent == 10 and warm_up is None
    )
    assert inputs.input_tokens_mean == 200 and inputs.extra_inputs == ("ignore_eos:true",)
    assert output.goodput == ("time_to_first_token:100", "inter_token_latency:20") and load.workers == 2


def test_triton_is_the_kserve_endpoint_by_default():
    assert parse("-m m --service-kind triton --backend vllm")[0].endpoint_type == "kserve"
    assert parse("-m m")[0].endpoint_type == "chat"


def test_a_command_line_of_aiperf():
    endpoint, load, _, output = parse(
        "--model a,b --url http://h1:80 --url http://h2:80 --endpoint-type completions --request-rate 10,20 "
        "--arrival-pattern gamma --arrival-smoothness 2.5 --concurrency 64 --benchmark-duration 30 "
        "--benchmark-grace-period 5 --warmup-request-count 10 --request-cancellation-rate 5 "
        '--request-cancellation-delay 0.5 --goodput "time_to_first_token:100 request_latency:900" --ui none'
    )
    assert endpoint.models == ("a", "b") and endpoint.urls == ("http://h1:80", "http://h2:80")
    plans = [plan for plan, _ in load.loads()]
    assert [plan.rate for plan in plans] == [10, 20] and plans[0].concurrency == 64
    assert plans[0].arrival is Arrival.GAMMA and plans[0].smoothness == 2.5 and plans[0].stable_percent == 0
    assert (plans[0].seconds, plans[0].grace_seconds, plans[0].cancel_percent) == (30, 5, 5)
    assert next(load.loads())[1].requests == 10 and len(output.goodput) == 2


def test_users_and_limits_of_the_prefill_phase_are_loads():
    _, load, *_ = parse(
        "-m m --user-centric-rate 2,4 --num-users 10 --prefill-concurrency 1,2 --request-count 9"
    )
    plans = [plan for plan, _ in load.loads()]
    assert [(plan.rate, plan.users, plan.prefill_concurrency) for plan in plans] == [
        (2, 10, 1), (2, 10, 2), (4, 10, 1), (4, 10, 2),
    ]  # fmt: skip
    assert plans[0].turn_gap_ns == 5_000_000_000 and plans[0].concurrency == 0
    assert load_name(plans[0]) == {"user_centric_rate": 2, "num_users": 10, "prefill_concurrency": 1}


@pytest.mark.parametrize(
    ("text", "values"), [("1,2,4", (1, 2, 4)), ("2:8:3", (2, 5, 8)), ("3:5", (3, 4, 5)), ("7", (7,))]
)
def test_lists_and_ranges_of_the_concurrency_are_a_sweep(text, values):
    assert tuple(plan.concurrency for plan, _ in parse(f"-m m --concurrency {text}")[1].loads()) == values


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--concurrency 0", "at least 1"),
        ("--concurrency 8:2:1", "START:END:STEP"),
        ("--request-rate -1", "at least"),
        ("--request-rate nan", "finite number"),
        ("--fixed-schedule --request-rate 5", "cannot be combined"),
        ("--user-centric-rate 5", "together"),
        ("--user-centric-rate 5 --num-users 2 --request-rate 5", "cannot be combined"),
        ("--prefill-concurrency 0", "at least 1"),
        ("--shared-memory cuda", "none or system"),
        ("--arrival-smoothness 2", "gamma"),
        ("--request-cancellation-rate 101", "at most 100"),
        ("--benchmark-grace-period 3", "benchmark-duration"),
        ("--header novalue", "NAME:VALUE"),
        ("--ssl-cert-file /no/such/file", "together"),
        ("--model-selection-strategy fastest", "round_robin or random"),
    ],
)
def test_invalid_values_are_refused_with_the_flag(line, message):
    with pytest.raises((OptionError, PerfError), match=message) as error:
        parse(f"-m m {line}")
    assert line.split()[0] in str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_options_without_a_counterpart_say_what_to_use(name):
    with pytest.raises(
        typer.BadParameter, match=f"--{name} is not supported: {REFUSED[name].split('{')[0][:20]}"
    ):
        normalized(["-m", "m", f"--{name}=1"])
