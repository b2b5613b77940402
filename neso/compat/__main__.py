"""Run a program written for `tritonserver` on Neso: `python -m neso.compat PROGRAM [ARGUMENT]...`."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from neso.compat import install


def main() -> None:
    """Install the replacement packages, then run the script or module."""
    parser = argparse.ArgumentParser(
        prog="python -m neso.compat",
        description="Run a Python program with Neso's implementation of `tritonserver` and `tritonfrontend`.",
    )
    parser.add_argument("--replace", action="store_true", help="override installed packages of these names")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module name")
    parser.add_argument("program", metavar="PROGRAM", help="script, or module with -m")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the program"
    )
    options = parser.parse_args()
    try:
        install(replace=options.replace)
    except ImportError as error:
        parser.error(f"{error}; use --replace to override it")
    sys.argv = [options.program, *options.arguments]
    if options.module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(options.program).resolve().parent))
        runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
