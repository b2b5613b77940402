"""Starts rank processes on this host by the mpiexec of the MPI library.

MPI ranks find each other by a process manager. Each MPI library has its own, which works only with that library.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError

_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")

_PR_SET_PDEATHSIG = 1


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process. Its ranks connect by torch.distributed instead of MPI."""
    return "TORCHELASTIC_RUN_ID" in environment


def mpiexec_command(num_ranks: int, *, cleanup: bool = False) -> list[str]:
    """Return the command that starts ranks on this host, without the program.

    `cleanup`: it ends all ranks when one ends by a signal. Raises `EngineError` if mpi4py, an MPI library or its
    mpiexec is missing.
    """
    family = mpi_family()
    for path in _candidates(family):
        if _family_of(_version(path)) != family:
            continue
        command = [path, "-n", str(num_ranks)]
        if family == "Open MPI":
            # The engine places its ranks itself. In containers the user is often root.
            return [*command, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        # The supervisor ends the other ranks, because it reports which one ended first. In spite of the
        # option, mpiexec of MPICH 5.0.2 sometimes kills them at once.
        return [*command, "-launcher", "fork", *([] if cleanup else ["-disable-auto-cleanup"])]
    raise EngineError(
        f"ranks need the mpiexec of the installed MPI library ({family}), which is not in PATH: "
        "`pip install neso-server[mpi]`, or the packages openmpi-bin or mpich"
    )


def mpi_family() -> str:
    """Return "Open MPI" or "MPICH", the library that mpi4py loads. Raises `EngineError`."""
    # In another process, because the library would stay in this one.
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    if result.returncode:
        raise missing_library(result.stderr.strip())
    return _family_of(result.stdout) or result.stdout.strip().splitlines()[0]


def missing_library(error: object) -> EngineError:
    """Return the error that mpi4py or an MPI library cannot be loaded."""
    lines = str(error).splitlines() or ["import failed"]
    return EngineError(
        f"tensor_parallel_size and pipeline_parallel_size need mpi4py and an MPI library ({lines[-1]}): "
        "`pip install neso-server[mpi]`"
    )


def check_launcher(library: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise `EngineError` if this rank was started by the launcher of an MPI library other than `library`.

    Its MPI would not know the launcher, and would take itself for the only rank. Slurm's ranks are not checked, because
    its plug-ins serve several libraries.
    """
    if "SLURM_STEP_ID" in environment:
        return
    launcher = "Open MPI" if "OMPI_COMM_WORLD_RANK" in environment else "MPICH"
    own = _family_of(library)
    if not own or own == launcher or not {"OMPI_COMM_WORLD_RANK", "PMI_RANK"} & environment.keys():
        return
    fitting = next((path for path in _candidates(own) if _family_of(_version(path)) == own), None)
    raise EngineError(
        f"this rank was started by mpiexec of {launcher}, but mpi4py uses {library.split(',')[0]}: start the ranks by "
        f"{fitting or 'mpiexec of ' + own}, or install {launcher} for mpi4py"
    )


def launcher_sockets(config: EngineConfig) -> list[int]:
    """Return the sockets by which a rank reaches the launcher that started this process, to pass them on.

    MPICH's launcher gives its ranks a socket by number. Empty if the engine starts its ranks itself.
    """
    number = os.environ.get("PMI_FD", "")
    return [int(number)] if config.rank_address is not None and number.isdigit() else []


def own_environment() -> dict[str, str]:
    """Return the environment without the variables of a launcher that started this process."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}


def die_with_parent() -> None:
    """End this process when the process that started it ends, even if this one is stopped. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _candidates(family: str) -> list[str]:
    """Return paths of mpiexec: of this Python environment first, then of PATH."""
    names = ["mpiexec", "mpirun"]
    names += ["mpiexec.openmpi"] if family == "Open MPI" else ["mpiexec.mpich", "mpiexec.hydra"]
    own = str(Path(sys.executable).parent)
    found = [shutil.which(name, path=path) for path in (own, os.environ.get("PATH", "")) for name in names]
    return list(dict.fromkeys(path for path in found if path is not None))


def _version(path: str) -> str:
    try:
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout + result.stderr


def _family_of(text: str) -> str:
    if any(word in text for word in ("Open MPI", "OpenRTE", "PRTE", "prterun", "Open-MPI")):
        return "Open MPI"
    return "MPICH" if any(word in text for word in ("MPICH", "HYDRA", "Intel(R) MPI", "MVAPICH")) else ""
