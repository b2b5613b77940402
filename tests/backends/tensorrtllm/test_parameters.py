"""TensorRT-LLM's parameters: effects, warnings and errors."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_encoder
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb
from trtllm_repository import write_model

from neso.backends.tensorrtllm.parameters import BY_NAME, PARAMETERS
from neso.backends.tensorrtllm.settings import read_settings
from neso.engine.config import EngineConfig
from neso.engine.core.scheduler_config import CPU_LIMITS, gpu_limits
from neso.engine.load.build import build_engine
from neso.engine.runners.runner_options import RunnerOptions
from neso.server.errors import InvalidArgument


@pytest.fixture
def read(tmp_path, checkpoint):
    """`read(model, parameter=value, ...)` returns the settings of a model with these parameters."""

    def settings(model=checkpoint, **options):
        folder = tmp_path / "tensorrt_llm"
        shutil.rmtree(folder, ignore_errors=True)
        write_model(tmp_path, model, **options)
        config = text_format.Parse((folder / "config.pbtxt").read_text(), pb.ModelConfig())
        return read_settings(config, folder / "1", folder)

    return settings


def test_unfilled_template_parameters_are_unset(read, checkpoint):
    settings = read()
    assert settings.engine == EngineConfig.from_options(
        str(checkpoint), {"batch_scheduler_policy": "guaranteed_no_evict", "enable_lora": "auto"}
    )
    assert (settings.max_beam_width, settings.exclude_input_in_output, settings.warnings) == (1, False, [])


def test_parameters_become_engine_options(read):
    engine = read(
        gpt_model_type="inflight_batching",
        batch_scheduler_policy="max_utilization",
        max_tokens_in_paged_kv_cache=2048,
        kv_cache_free_gpu_mem_fraction=0.5,
        enable_kv_cache_reuse="False",
        max_attention_window_size=64,
        sink_token_length=4,
        enable_chunked_context="true",
        max_num_tokens=256,
        max_queue_size=9,
        enable_trt_overlap="false",
        lora_cache_max_adapter_size=16,
        lora_cache_host_memory_bytes=1000,
    ).engine
    assert engine.scheduler.gpt_model_type == "inflight_batching"
    assert engine.scheduler.batch_scheduler_policy == "max_utilization"
    assert (engine.max_tokens_in_paged_kv_cache, engine.kv_cache_free_gpu_mem_fraction) == (2048, 0.5)
    assert (engine.max_attention_window_size, engine.sink_token_length) == (64, 4)
    assert not engine.scheduler.enable_prefix_caching and not engine.scheduler.enable_overlap
    assert (engine.scheduler.max_num_batched_tokens, engine.scheduler.max_queue_size) == (256, 9)
    assert engine.scheduler.max_prefill_chunk is None
    assert engine.lora.largest_rank == 16 and engine.lora.lora_cache_host_memory_bytes == 1000


def test_lists_and_trees(read):
    assert read(max_attention_window_size="64, 32,128").engine.max_attention_window_size == [64, 32, 128]
    medusa = read(decoding_mode="medusa", medusa_choices="{0}, {0, 0}, {1}").engine.speculation
    assert (medusa.speculative, medusa.medusa_choices) == ("medusa", [[0], [0, 0], [1]])


def test_legacy_spelling_and_static_batching(read):
    for spelled in ("V1", "v1"):
        assert not read(gpt_model_type=spelled).engine.scheduler.in_flight_batching


def test_disabled_chunked_context(read):
    scheduler = read(enable_chunked_context="false", max_num_tokens=800).engine.scheduler.resolve(CPU_LIMITS)
    assert scheduler.max_prefill_chunk == scheduler.max_num_batched_tokens == 800
    scheduler = read(enable_chunked_context="false").engine.scheduler.resolve(
        gpu_limits("NVIDIA H100", 80 << 30)
    )
    assert scheduler.max_prefill_chunk == scheduler.max_num_batched_tokens == 8192


def test_max_num_seqs_covers_max_batch_size(read):
    def limits(**parameters):
        scheduler = read(**parameters).engine.scheduler.resolve(CPU_LIMITS)
        return scheduler.max_num_seqs, scheduler.max_num_batched_tokens

    assert limits(max_batch_size=2048) == (2048, 2048)
    assert limits(max_batch_size=64) == (64, 1024)
    assert limits(max_batch_size=100, max_num_tokens=80) == (80, 80)
    assert limits(max_num_tokens=32) == (32, 32)
    assert limits(max_num_seqs=3) == (3, 1024)


def test_max_queue_size_of_dynamic_batching(read, tmp_path):
    read()
    path = tmp_path / "tensorrt_llm" / "config.pbtxt"
    config = text_format.Parse(path.read_text(), pb.ModelConfig())
    config.dynamic_batching.default_queue_policy.max_queue_size = 5
    settings = read_settings(config, path.parent / "1", path.parent)
    assert settings.engine.scheduler.max_queue_size == 5


# A valid and an invalid value for each parameter.
VALUES = {
    "gpt_model_type": ("inflight_fused_batching", "V2"),
    "batch_scheduler_policy": ("max_utilization", "static_batch"),
    "max_beam_width": ("2", "0"),
    "max_tokens_in_paged_kv_cache": ("4096", "many"),
    "kv_cache_free_gpu_mem_fraction": ("0.3", "1.5"),
    "kv_cache_host_memory_bytes": ("1000", "-1"),
    "enable_kv_cache_reuse": ("True", "maybe"),
    "max_attention_window_size": ("64,32", "64,no"),
    "sink_token_length": ("0", "-4"),
    "max_num_tokens": ("2048", "0"),
    "enable_chunked_context": ("true", "2"),
    "max_queue_size": ("4", "0"),
    "enable_trt_overlap": ("true", "x"),
    "exclude_input_in_output": ("1", "x"),
    "decoding_mode": ("top_k", "greedy"),
    "medusa_choices": ("{0}", "{a}"),
    "lora_cache_max_adapter_size": ("32", "0"),
    "lora_cache_host_memory_bytes": ("1000", "1G"),
    "num_nodes": ("1", "0"),
    "lora_cache_optimal_adapter_size": ("8", "x"),
    "lora_cache_gpu_memory_fraction": ("0.05", "5"),
    "normalize_log_probs": ("true", "x"),
    "guided_decoding_backend": ("xgrammar", "outlines"),
    "gpu_device_ids": ("0,1;2,3", "0;gpu"),
    "participant_ids": ("0", "a"),
    "cancellation_check_period_ms": ("100", "x"),
    "recv_poll_period_ms": ("10", "x"),
    "stats_check_period_ms": ("100", "x"),
    "iter_stats_max_iterations": ("1000", "x"),
    "request_stats_max_iterations": ("0", "x"),
    "cross_kv_cache_fraction": ("0.5", "x"),
    "eagle_choices": ("{0},{0,1}", "{}"),
    "lookahead_window_size": ("4", "x"),
    "lookahead_ngram_size": ("4", "x"),
    "lookahead_verification_set_size": ("4", "x"),
    "gpu_weights_percent": ("0.5", "x"),
    "multi_block_mode": ("true", "x"),
    "enable_context_fmha_fp32_acc": ("true", "x"),
    "cuda_graph_mode": ("true", "x"),
    "cuda_graph_cache_size": ("16", "x"),
    "speculative_decoding_fast_logits": ("false", "x"),
    "kv_cache_onboard_blocks": ("true", "x"),
}
PATHS = {
    *("gpt_model_path", "tokenizer_dir", "lora_prefetch_dir", "encoder_model_path"),
    *("xgrammar_tokenizer_info_path", "executor_worker_path", "FORCE_CPU_ONLY_INPUT_TENSORS"),
}


def test_all_parameters_of_the_template_are_known():
    assert VALUES.keys() | PATHS == BY_NAME.keys()
    assert len(BY_NAME) == len(PARAMETERS)


@pytest.mark.parametrize("name", VALUES)
def test_every_parameter_is_parsed(read, name):
    good, bad = VALUES[name]
    warnings = read(**{name: good}).warnings
    has_effect = BY_NAME[name].option or BY_NAME[name].setting
    without_effect = not has_effect or name == "kv_cache_host_memory_bytes"
    assert [f"'{name}' has no effect: " in warning for warning in warnings] == [True] * without_effect
    with pytest.raises(InvalidArgument) as refused:
        read(**{name: bad})
    assert f"parameter '{name}' of model 'tensorrt_llm' is '{bad}', expected " in refused.value.message


@pytest.mark.parametrize("mode", ["redrafter", "lookahead", "eagle"])
def test_unsupported_decoding_modes_are_rejected(read, mode):
    with pytest.raises(
        InvalidArgument, match=rf"'decoding_mode' .* is '{mode}', which is not supported: .*speculative"
    ):
        read(decoding_mode=mode)


def test_encoders_and_several_nodes_are_rejected(read):
    with pytest.raises(
        InvalidArgument, match=r"'encoder_model_path' .* encoder-decoder models are not supported"
    ):
        read(encoder_model_path="/models/encoder")
    with pytest.raises(InvalidArgument, match=r"'num_nodes' .* is '2', expected 1"):
        read(num_nodes=2)


def test_engine_options_as_parameters(read, checkpoint, tmp_path):
    assert read(
        files={"draft": checkpoint}, speculative_model="draft"
    ).engine.speculation.speculative_model == str(tmp_path / "tensorrt_llm" / "draft")
    with pytest.raises(InvalidArgument, match=r"'max_num_seqs' .* is 'x', expected an integer"):
        read(max_num_seqs="x")
    with pytest.raises(InvalidArgument, match="engine option 'kv_cache_memory'"):
        read(kv_cache_memory="x")


async def test_embedding_model_is_rejected(serve_model, tmp_path):
    served = await serve_model(make_encoder(tmp_path / "encoder", "bert"))
    assert served.reason == "gpt_model_path: the model is an embedding model; use the backend 'embedding'"


def test_unknown_parameter_is_ignored_with_a_warning(read):
    assert read(max_beam_wdith=3).warnings == ["parameter 'max_beam_wdith' is unknown and ignored"]


async def test_warnings_are_logged(serve_model, caplog):
    with caplog.at_level(logging.WARNING, "neso.backends.tensorrtllm"):
        await serve_model(cuda_graph_mode="true", cancellation_check_period_ms=100)
    logged = [record.getMessage() for record in caplog.records]
    assert (
        "model 'tensorrt_llm': parameter 'cuda_graph_mode' has no effect: CUDA graphs of decode steps are "
        "always captured if possible" in logged
    )
    assert not any("executor_worker_path" in line or "dynamic_batching" in line for line in logged)


@pytest.mark.parametrize("kept", ["0", "1000"])
async def test_metrics_of_iterations(serve_model, kept):
    served = await serve_model(iter_stats_max_iterations=kept)
    await served.tokens(length=2)
    rendered = (await served.core.render_metrics()).decode()
    assert ("nv_trt_llm_general_metrics{" in rendered) == (kept != "0")
    assert "vllm:num_requests_running{" in rendered


async def test_metrics_of_static_batches(serve_model):
    """Sums over the sequences of the last batch."""
    served = await serve_model(gpt_model_type="V1")
    await served.tokens([5, 6, 7], length=9)
    await served.tokens([5, 6, 7, 8, 9], length=20)
    rendered = (await served.core.render_metrics()).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in rendered if line.startswith("nv_trt_llm_v1_metrics{"))
    named = {name.split('v1_specific_metric="')[1].split('"')[0]: value for name, value in values.items()}
    assert named == {
        "total_context_tokens": "5",
        "total_generation_tokens": "20",
        "empty_generation_slots": "0",
    }


async def test_unfilled_backend_of_the_template(serve_model, greedy):
    served = await serve_model(change=lambda text: text.replace('"tensorrtllm"', '"${triton_backend}"'))
    assert await served.tokens() == greedy()


async def test_invalid_value_makes_the_model_unavailable(serve_model):
    served = await serve_model(max_beam_width="wide")
    assert served.reason == (
        "parameter 'max_beam_width' of model 'tensorrt_llm' is 'wide', expected an integer, at least 1"
    )


# -- model location ----------------------------------------------------------------------------------------------


async def test_engine_directory(serve_model, checkpoint, tmp_path, greedy):
    build_engine(checkpoint, tmp_path / "built", RunnerOptions())
    served = await serve_model(tmp_path / "built")
    assert await served.tokens() == greedy()


async def test_a_gguf_file(serve_model, checkpoint, tmp_path, greedy):
    pytest.importorskip("gguf")
    from gguf_files import convert

    served = await serve_model(convert(checkpoint, tmp_path / "model.gguf"))
    assert await served.tokens() == greedy()


@pytest.mark.parametrize("place", ["1/inside", "inside"])
async def test_path_relative_to_the_model(serve_model, checkpoint, place, greedy):
    """Relative to the version folder or the model folder."""
    served = await serve_model("inside", files={place: checkpoint})
    assert await served.tokens() == greedy()


@pytest.mark.parametrize("path", ["${engine_dir}", ""])
async def test_model_in_the_version_directory(serve_model, checkpoint, path, greedy):
    served = await serve_model(path, files={"1": checkpoint})
    assert await served.tokens() == greedy()


def test_a_bundled_model(read):
    from neso.models import SHIPPED_MODELS

    assert read("neso-pilot").engine.model == str(SHIPPED_MODELS["neso-pilot"])


def test_tensorrt_engines_are_rejected(read, tmp_path):
    (tmp_path / "trt").mkdir()
    (tmp_path / "trt" / "rank0.engine").touch()
    with pytest.raises(InvalidArgument, match=r"contains a TensorRT engine.*neso build"):
        read(tmp_path / "trt")
    (tmp_path / "trt" / "rank0.engine").unlink()
    (tmp_path / "trt" / "config.json").write_text('{"mapping": {"tp_size": 1}}')
    with pytest.raises(InvalidArgument, match=r"converted for TensorRT-LLM.*neso build"):
        read(tmp_path / "trt")


def test_missing_model_is_rejected(read):
    with pytest.raises(InvalidArgument, match=r"gpt_model_path: is not set, and .*/1 contains no model"):
        read("")
    with pytest.raises(InvalidArgument, match="gpt_model_path: /nowhere: there is no such directory"):
        read("/nowhere")


def test_a_directory_without_a_model(read, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=r"gpt_model_path: .*/empty contains no model"):
        read(tmp_path / "empty")


# -- the tokenizer ------------------------------------------------------------------------------------------------


@pytest.fixture
def bare_checkpoint(checkpoint, tmp_path) -> Path:
    """The checkpoint without its tokenizer."""
    directory = tmp_path / "bare"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / name, directory)
    return directory


async def test_without_a_tokenizer(serve_model, bare_checkpoint, greedy):
    served = await serve_model(bare_checkpoint)
    assert await served.tokens() == greedy()
    assert served.core.model("tensorrt_llm").language_model is None


async def test_tokenizer_dir(serve_model, bare_checkpoint, checkpoint, greedy):
    served = await serve_model(bare_checkpoint, tokenizer_dir=checkpoint)
    assert await served.tokens() == greedy()
    text = served.core.model("tensorrt_llm").language_model.text
    assert text.decode(text.encode("The quick")) == "The quick"


def test_generation_config_path_is_resolved(read, tmp_path):
    assert read().engine.generation_config == "auto"
    assert read(generation_config="vllm").engine.generation_config == "vllm"
    place = tmp_path / "defaults"
    place.mkdir()
    assert read(generation_config=place).engine.generation_config == str(place)
    engine = read(generation_config="1", override_generation_config='{"top_k": 5}').engine
    assert engine.generation_config == str(tmp_path / "tensorrt_llm" / "1")
    assert engine.override_generation_config == {"top_k": 5}


# -- template format -------------------------------------------------------------------------------------------------

OLD_TEMPLATE = """
name: "tensorrt_llm"
backend: "tensorrtllm"
max_batch_size: 4
model_transaction_policy { decoupled: true }
dynamic_batching {
    preferred_batch_size: [ 4 ]
    max_queue_delay_microseconds: 0
    default_queue_policy: { max_queue_size: 3 }
}
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true },
  # lengths
  { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } },
  { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "random_seed" data_type: TYPE_UINT64 dims: [ 1 ] reshape: { shape: [ ] } optional: true },
  { name: "stop" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [
  { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] },
  { name: "sequence_length" data_type: TYPE_INT32 dims: [ -1 ] }
]
instance_group [ { count: 1 kind : KIND_CPU } ]
parameters: { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: { string_value: "no" } }
parameters: { key: "gpt_model_path" value: { string_value: "MODEL" } }
parameters: { key: "medusa_choices"
    value: {
      string_value: "${medusa_choices}"
  }
}
"""


async def test_configured_tensors_are_kept(serve_model, checkpoint, greedy):
    served = await serve_model(change=lambda config: OLD_TEMPLATE.replace("MODEL", str(checkpoint)))
    assert served.reason == ""
    assert await served.tokens() == greedy()
    config = served.core.model("tensorrt_llm").config
    assert [len(config.input), len(config.output)] == [6, 2]
    with pytest.raises(InvalidArgument, match="unexpected inference input 'beam_width'"):
        await served.tokens(beam_width=np.array([[1]], np.int32))
