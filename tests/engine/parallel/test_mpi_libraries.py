"""Launchers and MPI libraries that do not fit, and windows of any library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import neso.engine.parallel.launcher as module
from neso.engine.errors import EngineError
from neso.engine.parallel.communicator import SEGMENT_ALIGNMENT, aligned_segment
from neso.engine.parallel.launcher import check_launcher, missing_library

OPEN_MPI = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"
MPICH, INTEL = "MPICH Version: 5.0.2", "Intel(R) MPI Library 2021.19"
BY_OPEN_MPI, BY_MPICH = {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, {"PMI_RANK": "0"}


@pytest.mark.parametrize(
    ("library", "environment"),
    [
        (OPEN_MPI, BY_OPEN_MPI),
        (MPICH, BY_MPICH),
        (INTEL, BY_MPICH),
        (MPICH, {}),
        (OPEN_MPI, {**BY_MPICH, "SLURM_STEP_ID": "0"}),
        ("Cray MPI", BY_OPEN_MPI),
    ],
)
def test_launchers_of_the_own_library(library: str, environment: dict[str, str]) -> None:
    check_launcher(library, environment)


@pytest.mark.parametrize(
    ("library", "environment", "message"),
    [
        (OPEN_MPI, BY_MPICH, "mpiexec of MPICH, but mpi4py uses Open MPI v4.1.4: "),
        (MPICH, BY_OPEN_MPI, "mpiexec of Open MPI, but mpi4py uses MPICH Version: 5.0.2: "),
        (INTEL, BY_OPEN_MPI, "mpiexec of Open MPI, but mpi4py uses Intel"),
    ],
)
def test_launcher_of_another_library_is_an_error(
    library: str, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(EngineError, match=f"this rank was started by {message}".replace("(", r"\(")):
        check_launcher(library, environment)


@pytest.mark.parametrize("has_launcher", [False, True])
def test_error_names_the_launcher_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_launcher: bool
) -> None:
    path = tmp_path / "mpiexec.mpich"
    monkeypatch.setattr(module, "_candidates", lambda _: [str(path)] if has_launcher else [])
    path.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    path.chmod(0o755)
    expected = (
        f"start the ranks by {path if has_launcher else 'mpiexec of MPICH'}, or install Open MPI for mpi4py"
    )
    with pytest.raises(EngineError, match=expected):
        check_launcher(MPICH, BY_OPEN_MPI)


def test_missing_library_is_named_with_what_to_install() -> None:
    assert "(libmpi.so.12: no such file): `pip install neso-server[mpi]`" in str(
        missing_library(ImportError("cannot load\nlibmpi.so.12: no such file"))
    )


@pytest.mark.parametrize("offset", [0, 8, 60])
def test_segments_are_aligned_wherever_the_window_begins(offset: int) -> None:
    window = np.zeros(4096 + SEGMENT_ALIGNMENT + 60, np.uint8)[offset:]
    segment = aligned_segment(window, 4096)
    assert len(segment) == 4096 and segment.ctypes.data % SEGMENT_ALIGNMENT == 0
    assert segment.flags.writeable
