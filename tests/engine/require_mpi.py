"""Skips tests that need MPI where it is not installed."""

from __future__ import annotations

import pytest

from neso.engine.errors import EngineError
from neso.engine.parallel.launcher import mpiexec_command


def _missing() -> str:
    try:
        mpiexec_command(2)
    except EngineError as error:
        return str(error)
    return ""


_reason = _missing()
requires_mpi = pytest.mark.skipif(bool(_reason), reason=_reason or "MPI is installed")
