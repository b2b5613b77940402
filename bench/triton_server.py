"""Triton for comparison: the server in the `nvidia-pytriton` wheel with its Python backend, on the CPU."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from contextlib import AbstractContextManager
from pathlib import Path

from peer_server import RunningServer, serve

WHEEL = "nvidia-pytriton==0.7.0"
HTTP_PORT, GRPC_PORT = 18000, 18001


def install() -> Path:
    """Return the interpreter of a scratch environment with Triton's wheel, created once per user."""
    folder = Path(tempfile.gettempdir()) / f"bench-triton-{os.getuid()}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"installing {WHEEL} into a scratch environment", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", WHEEL], check=True)
        (folder / "installed").touch()
    return python


def triton(python: Path, repository: Path, *options: str) -> AbstractContextManager[RunningServer]:
    """Serve a model repository. `python`: an interpreter with the wheel, see `install`."""
    found = subprocess.run(
        [
            python,
            "-c",
            "import sys, sysconfig; print(sysconfig.get_path('purelib')); print(*sys.version_info[:2], sep='.')",
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    home = Path(found[0]) / "pytriton" / "tritonserver"
    backends = home / "backends"
    # The stub that runs models depends on the Python version; the backend expects it in its own folder.
    stub = home / "python_backend_stubs" / found[1] / "triton_python_backend_stub"
    place = backends / "python" / stub.name
    if not place.exists() or not filecmp.cmp(stub, place):
        shutil.copy2(stub, place)
    command = [
        str(home / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        f"--http-port={HTTP_PORT}",
        f"--grpc-port={GRPC_PORT}",
        "--allow-metrics=false",
        "--log-info=false",
        *options,
    ]
    environment = {
        "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    url = f"http://127.0.0.1:{HTTP_PORT}"
    return serve("triton", command, url, "", environment=environment, probe="/v2/health/ready")
