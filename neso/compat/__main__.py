"""Runs a program with Neso in the place of Triton: `python -m neso.compat PROGRAM [ARGUMENT]...`."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from neso.compat import install


def main() -> None:
    """Install the packages, then run what the command line names, as Python itself would."""
    parser = argparse.ArgumentParser(
        prog="python -m neso.compat",
        description="Run a Python program, and let its `import tritonserver` and `import tritonfrontend` find Neso's.",
    )
    parser.add_argument("--replace", action="store_true", help="even where the real packages are installed")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is the name of a module")
    parser.add_argument("program", metavar="PROGRAM", help="a script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="for the program")
    options = parser.parse_args()
    try:
        install(replace=options.replace)
    except ImportError as error:
        parser.error(f"{error}; --replace has the program use Neso's")
    sys.argv = [options.program, *options.arguments]
    if options.module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(options.program).resolve().parent))
        runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
