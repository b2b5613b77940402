"""Options of the engine: declaration, conversion, errors."""

from __future__ import annotations

import msgspec
import pytest

from neso.engine.config import EngineConfig, engine_options


def test_every_option_has_one_name_and_a_help_text():
    options = engine_options()
    assert len({option.name for option in options}) == len(options)
    assert all(option.help.endswith(".") and len(option.help) <= 90 for option in options)


def test_defaults_are_those_of_a_config_without_options():
    config = EngineConfig.from_options("model", {})
    for option in engine_options():
        owner = getattr(config, option.part) if option.part else config
        assert getattr(owner, option.name) == option.default, option.name


def test_options_are_converted_and_set_in_their_part():
    options = {
        "max_num_seqs": "4",
        "enable_kv_cache_reuse": "false",
        "override_generation_config": '{"top_k": 3}',
        "lora_modules": {"a": "path"},
    }
    config = EngineConfig.from_options("model", options)
    assert (config.scheduler.max_num_seqs, config.scheduler.enable_prefix_caching) == (4, False)
    assert config.override_generation_config == {"top_k": 3}
    assert config.lora.lora_modules == {"a": "path"}
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqs": 1}, "unknown engine option 'max_seqs', known are tokenizer, "),
        ({"num_threads": "many"}, "engine option 'num_threads': Expected `int"),
        ({"lora_modules": "{"}, "engine option 'lora_modules': "),
        ({"step_timeout": -1}, "step_timeout must be at least 0"),
        ({"max_cuda_graph_batch": -1}, "max_cuda_graph_batch must be at least 0"),
    ],
)
def test_errors_name_the_option(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_options("model", options)
