"""Attention backends of the torch runner, with stand-ins of the libraries; tests/gpu runs the libraries."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType

import attention_standins
import pytest
import torch
from attention_cases import AttentionBackendCases
from plan_builder import PlanBuilder
from torch_cases import CPU, PLAIN

from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.load.loader import load_engine
from neso.engine.runners.runner_options import RunnerOptions, UnsupportedOption
from neso.engine.runners.torch.attention import AttentionBackend, AttentionNeeds, open_attention
from neso.engine.runners.torch.flash_attention import FlashAttention
from neso.engine.runners.torch.flashinfer_attention import FlashInferAttention, Pages
from neso.engine.runners.torch.kv_cache import HeadShape, LayerCache
from neso.engine.runners.torch.step_inputs import step_inputs

GPU = torch.device("cuda")
WIDE = HeadShape(2, 64, 64)


@pytest.fixture
def device() -> torch.device:
    return CPU


@pytest.fixture
def dtype() -> torch.dtype:
    return torch.bfloat16


def make_backend(name: str) -> AttentionBackend:
    """Return a backend that calls the stand-in. Others, such as transformers, do not find the stand-in."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, name, attention_standins.modules()[name])
        if name == "flash_attn":
            return FlashAttention(PLAIN.attention)
        return FlashInferAttention(PLAIN.attention, CPU)


@pytest.fixture(params=["flash_attn", "flashinfer"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return make_backend(request.param)


class TestStandIns(AttentionBackendCases):
    pass


def test_layers_of_a_kind_share_the_plan_of_a_step() -> None:
    backend = make_backend("flashinfer")
    assert isinstance(backend, FlashInferAttention)
    builder = PlanBuilder(16)
    sequence = builder.sequence([7] * 40)
    cache = LayerCache(*torch.zeros(2, 256, 16, 2, 64, dtype=torch.float16))
    for count in (30, 10):
        inputs = step_inputs(builder.plan([(sequence, count)]), 16, CPU)
        queries = torch.zeros(count, 4, 64, dtype=torch.float16)
        for window in (None, 9, None, 9, None):
            backend(queries, cache, inputs, window, 1.0, 0.0)
    assert [each._wrapper.num_plans for each in backend._planned.values()] == [2, 2]


@pytest.mark.parametrize(
    ("window", "starts", "indices", "last_lengths"),
    [
        (None, [0, 3, 4], [5, 6, 7, 8], [2, 4]),
        (4, [0, 2, 3], [6, 7, 8], [2, 4]),
        (1, [0, 1, 2], [7, 8], [2, 4]),
    ],
)
def test_pages_start_at_the_window(
    window: int | None, starts: list[int], indices: list[int], last_lengths: list[int]
) -> None:
    """Blocks of 4: one token after 9 others, and 4 new ones."""
    builder = PlanBuilder(4)
    one, two = builder.sequence([1] * 10), builder.sequence([1] * 4)
    one.num_computed, one.blocks, two.blocks = 9, [5, 6, 7], [8]
    pages = Pages.of(builder.plan([(one, 1), (two, 4)]), 4, window)
    assert [part.tolist() for part in pages] == [starts, indices, last_lengths]


@pytest.mark.parametrize(
    ("needs", "flash_attn", "flashinfer"),
    [
        (AttentionNeeds([WIDE], torch.float16, 256), None, None),
        (AttentionNeeds([WIDE], torch.bfloat16, 16), "a multiple of 256, not 16", None),
        (AttentionNeeds([WIDE], torch.float32, 256), "not in float32", "not in float32"),
        (AttentionNeeds([WIDE], torch.float8_e4m3fn, 256), "not in float8", "not in float8"),
        (AttentionNeeds([WIDE], torch.float16, 256, 4), "sink_token_length=4", "sink_token_length=4"),
        (AttentionNeeds([WIDE, HeadShape(2, 80, 80)], torch.float16, 256), None, "heads of 80"),
        (AttentionNeeds([HeadShape(2, 60, 60)], torch.float16, 256), "heads of 60", "heads of 60"),
        (AttentionNeeds([HeadShape(2, 512, 512)], torch.float16, 256), "heads of 512", "heads of 512"),
        (AttentionNeeds([HeadShape(2, 128, 64)], torch.float16, 256), "as wide as", "as wide as"),
    ],
    ids=["supported", "block size", "float32", "float8", "sinks", "80", "60", "512", "narrow values"],
)
def test_what_a_library_does_not_have_is_refused(
    needs: AttentionNeeds, flash_attn: str | None, flashinfer: str | None
) -> None:
    for name, problem in (("flash_attn", flash_attn), ("flashinfer", flashinfer)):
        backend = make_backend(name)
        if problem is None:
            backend.check(needs)
        else:
            with pytest.raises(UnsupportedOption, match=rf"^attention_backend: {name} .*{problem}"):
                backend.check(needs)


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_the_triton_kernel_is_the_default(name) -> None:
    attention = open_attention(GPU, RunnerOptions(attention_backend=name))
    assert attention.__name__ == "paged_attention"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "package"), [("flash_attn", "flash-attn"), ("flashinfer", "flashinfer-python")]
)
def test_a_missing_package_is_named(name, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedOption, match=rf"^attention_backend: {name} needs `pip install {package}`"):
        open_attention(GPU, RunnerOptions(attention_backend=name))


def test_a_version_without_block_tables_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("flash_attn")
    old.flash_attn_varlen_func = lambda q, k, v, window_size, softcap: q  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", old)
    with pytest.raises(UnsupportedOption, match=r"2\.6 or later, this version has no block_table"):
        FlashAttention(PLAIN.attention)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the backends")
@pytest.mark.parametrize("name", ["triton", "flashinfer", "flash_attn"])
def test_a_named_backend_is_refused_on_a_cpu(llama_checkpoint: Path, name: str) -> None:
    options = {"runner": "torch", "attention_backend": name}
    with pytest.raises(EngineError, match=f"attention_backend: {name} needs a GPU, this is cpu; use auto"):
        load_engine(EngineConfig.from_options(str(llama_checkpoint), options))


@pytest.mark.parametrize("runner", ["native", "reference"])
def test_other_runners_have_no_backends(llama_checkpoint: Path, runner: str) -> None:
    options = {"runner": runner, "attention_backend": "flashinfer"}
    with pytest.raises(EngineError, match=r"attention_backend: .* has its own attention, not flashinfer"):
        load_engine(EngineConfig.from_options(str(llama_checkpoint), options))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_backend"):
        EngineConfig.from_options("model", {"attention_backend": "xformers"})


def test_standin_of_flashinfer_has_arguments_of_the_package() -> None:
    """The wrapper's methods by name, argument and default, where the package is installed."""
    real = pytest.importorskip("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    for method in ("__init__", "plan", "run"):
        _assert_arguments_exist(
            getattr(attention_standins.BatchPrefillWithPagedKVCacheWrapper, method), getattr(real, method)
        )


def test_standin_of_flash_attn_has_arguments_of_the_package() -> None:
    real = pytest.importorskip("flash_attn").flash_attn_varlen_func
    _assert_arguments_exist(attention_standins.flash_attn_varlen_func, real)


def _assert_arguments_exist(standin, real) -> None:
    found = inspect.signature(real).parameters
    for name, parameter in inspect.signature(standin).parameters.items():
        assert found[name].default == parameter.default, name
