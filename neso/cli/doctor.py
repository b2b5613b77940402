"""`neso doctor`: what Neso finds on this machine, and how fast models can run on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

_PORTS = {8000: "KServe HTTP", 8001: "KServe gRPC", 8002: "metrics", 9000: "OpenAI API"}
_PACKAGES = ("numpy", "tokenizers", "llguidance", "tritonclient", "grpcio", "huggingface_hub")
_EXTRAS = {
    "torch": ("torch", "torch runner for GPUs, PyTorch backend, models through transformers"),
    "transformers": ("torch", "decoders without a specification of their own"),
    "vllm": ("vllm", "vLLM backend"),
    "onnxruntime": ("onnx", "ONNX Runtime backend"),
    "openvino": ("openvino", "OpenVINO backend"),
    "tensorflow": ("tensorflow", "TensorFlow backend"),
    "PIL": ("vision", "images in prompts"),
    "mpi4py": ("mpi", "ranks of one model by MPI"),
    "opentelemetry": ("otel", "OpenTelemetry traces"),
    "redis": ("redis", "response cache in Redis"),
    "fsspec": ("cloud", "model repositories in cloud storage"),
}
_FEATURES = ("amx_tile", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "fma")
_ARM_FEATURES = ("sve2", "sve", "i8mm", "bf16", "asimddp", "asimd")
_BITS = {"bf16": 16, "int8": 8, "int4": 4.25}
_SIZES = {"0.6B": 0.6e9, "8B": 8e9}
_BUFFER_BYTES = 1 << 29
"""Larger than the caches, but not by much: on virtual machines, touching new pages takes longer than reading."""


class Finding(NamedTuple):
    """A line of the report. `problem`: something that users should change."""

    topic: str
    text: str
    problem: bool = False


def doctor(
    speed: Annotated[
        bool, typer.Option(help="Measure memory and compute for a few seconds. Uses 0.5 GB of memory.")
    ] = True,
) -> None:
    """Show what Neso finds on this machine: CPU features and runner, GPU, memory, ports, packages, speed.

    The exit status is 1 if something has to be changed before Neso can serve a model.
    """
    failed = False
    for finding in findings(speed):
        failed |= finding.problem
        print(f"{'!' if finding.problem else ' '} {finding.topic:<10} {finding.text}", flush=True)
    raise typer.Exit(1 if failed else 0)


def findings(speed: bool) -> Iterator[Finding]:
    """Yield the lines of the report. `speed`: also measure."""
    yield from _versions()
    yield from _processor()
    yield from _gpus()
    yield from _memory()
    yield from _ports()
    yield from _extras()
    if speed:
        yield from _speed()


def _versions() -> Iterator[Finding]:
    import neso

    version = f"{neso.__version__} in {Path(neso.__file__).parent}"
    yield Finding("neso", version)
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    hub = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    token = "HF_TOKEN is set" if os.environ.get("HF_TOKEN") else "without HF_TOKEN"
    yield Finding("hub cache", f"{hub}, {token}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> Iterator[Finding]:
    from neso.engine.host_resources import physical_cores
    from neso.engine.thread_placement import place_threads

    info = _cpu_info()
    cores = physical_cores()
    yield Finding("cpu", f"{info.get('model name', 'unknown')}, {len(cores)} cores for this process")
    yield Finding("threads", place_threads().describe())
    nodes = len({core.node for core in cores})
    if nodes > 1:
        yield Finding("numa", f"{nodes} nodes; run an engine on each: --data-parallel-size {nodes}")
    flags = set((info.get("flags") or info.get("Features") or "").split())
    known = [name for name in (*_FEATURES, *_ARM_FEATURES) if name in flags]
    yield Finding("features", ", ".join(known) or "none that the kernels use")
    try:
        import neso._native as native
    except ImportError as error:
        yield Finding("kernels", f"the compiled kernels cannot be loaded: {error}", problem=True)
        return
    from neso.engine.runners.registry import runner_class

    isas = native.supported_isas()
    yield Finding("kernels", f"{native.default_isa()} (also {', '.join(isas[1:]) or 'none'})")
    yield Finding("runner", f"{runner_class().__name__} is the default")


def _cpu_info() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {"model name": platform.processor()}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _gpus() -> Iterator[Finding]:
    from neso.engine.runners.registry import has_nvidia_gpu

    if not has_nvidia_gpu():
        yield Finding("gpu", "no NVIDIA driver")
        return
    if importlib.util.find_spec("torch") is None:
        yield Finding("gpu", "an NVIDIA driver, but no torch: pip install 'neso-server[torch]'", problem=True)
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("gpu", f"torch {torch.__version__} cannot use the GPU", problem=True)
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        yield Finding("gpu", f"{number}: {properties.name}, {properties.total_memory / 1e9:.0f} GB")


def _memory() -> Iterator[Finding]:
    from neso.engine.host_resources import available_memory

    available = available_memory()
    yield Finding("memory", f"{available / 1e9:.1f} GB available", problem=available < 1e9)
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    if shared is not None:
        # Python models in processes and KV transfers between workers use it; containers often have 64 MB.
        small = " (small: processes of Python models exchange tensors there)" if shared.total < 256e6 else ""
        yield Finding("/dev/shm", f"{shared.free / 1e6:.0f} MB free of {shared.total / 1e6:.0f} MB{small}")


def _ports() -> Iterator[Finding]:
    used = [f"{port} ({use})" for port, use in _PORTS.items() if not _is_free(port)]
    if used:
        yield Finding(
            "ports", f"in use: {', '.join(used)}; a second server needs other ports, as --http-port"
        )
    else:
        yield Finding("ports", f"{', '.join(map(str, _PORTS))} are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _extras() -> Iterator[Finding]:
    for module, (extra, use) in _EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        state = "installed" if there else f"not installed, pip install 'neso-server[{extra}]'"
        yield Finding("extra", f"{module}: {state} ({use})")


def _speed() -> Iterator[Finding]:
    """Measure the machine's limits, and the model that ships."""
    import neso._native as native
    from neso.engine.diagnostics.machine_speed import bandwidths, matmul_rate
    from neso.engine.host_resources import available_cores

    threads, isa = available_cores(), native.default_isa()
    reads = bandwidths(isa, threads, _BUFFER_BYTES, least=0.2)
    bandwidth = max(reads.values())
    share = reads["product with a row"] / bandwidth
    yield Finding("bandwidth", f"{bandwidth:.1f} GB/s; the kernels of decode steps reach {share:.0%} of it")
    rates = {kind: matmul_rate(kind, isa, threads, least=0.1) for kind in ("bf16", "int8_dynamic")}
    yield Finding(
        "compute", f"{rates['bf16']:.0f} GFLOP/s in bf16, {rates['int8_dynamic']:.0f} in int8_dynamic"
    )
    for size, parameters in _SIZES.items():
        decode = {name: 8e9 * bandwidth / parameters / bits for name, bits in _BITS.items()}
        prefill = rates["bf16"] * 1e9 / (2 * parameters)
        limits = ", ".join(f"{name} {rate:.3g}" for name, rate in decode.items())
        yield Finding(
            f"{size} model",
            f"at most {limits} tokens/s for one request; prefill {prefill:.3g} tokens/s in bf16",
        )
    yield from _pilot_speed()


def _pilot_speed() -> Iterator[Finding]:
    import neso

    started = time.perf_counter()
    llm = neso.LLM("neso-pilot")
    ready = time.perf_counter()
    sampling = neso.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = ["What is paged attention?"] * 8
    llm.generate(prompts[:1], sampling, progress=False)
    begin = time.perf_counter()
    results = llm.generate(prompts, sampling, progress=False)
    seconds = time.perf_counter() - begin
    tokens = sum(result.usage.completion_tokens for result in results)
    yield Finding(
        "neso-pilot", f"loaded in {ready - started:.1f} s, {tokens / seconds:.0f} tokens/s with 8 requests"
    )
