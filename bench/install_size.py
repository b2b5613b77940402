"""Size and duration of the base install in a fresh virtual environment: under 300 MB, without torch.

usage: python bench/install_size.py [--without-compiling]        exits with 1 above the limit
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from smoke import parse_arguments

LIMIT_MB = 300
ROOT = Path(__file__).parent.parent
WEB = ROOT / "neso" / "frontends" / "web"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--without-compiling",
        action="store_true",
        help="install no compiled extensions and add the size of those that this Python imports",
    )
    arguments = parse_arguments(parser)
    with tempfile.TemporaryDirectory() as scratch:
        venv = Path(scratch) / "venv"
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        before = size_mb(venv)
        started = time.perf_counter()
        pip = [venv / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if arguments.without_compiling:
            pip += ["-C", "wheel.cmake=false"]
        if not arguments.smoke:  # a smoke run installs nothing: it needs the network
            subprocess.run([*pip, "-c", ROOT / "constraints.txt", ROOT], check=True)
        seconds = time.perf_counter() - started
        installed = size_mb(venv) - before
        if arguments.without_compiling:
            installed += extensions_mb()
        torch = any(venv.glob("lib/*/site-packages/torch"))
        print(f"base install: {installed:.0f} MB in {seconds:.0f} s, torch: {'yes' if torch else 'no'}")
        missing = [] if arguments.smoke else missing_files(venv)
        if missing:
            print(f"files of the web pages that are not installed: {', '.join(map(str, missing))}")
        return int(installed > LIMIT_MB or torch or bool(missing))


def missing_files(venv: Path) -> list[Path]:
    """Return the files of the web pages that the wheel does not contain."""
    (installed,) = venv.glob("lib/*/site-packages/neso/frontends")
    names = [path.relative_to(WEB.parent) for path in WEB.rglob("*") if path.is_file()]
    return [name for name in names if not (installed / name).is_file()]


def extensions_mb() -> float:
    """Size of the compiled extensions that this Python imports, in MB (10^6 bytes)."""
    specs = [find_spec(f"neso.{name}") for name in ("_native", "_wire")]
    return sum(Path(spec.origin).stat().st_size for spec in specs if spec and spec.origin) / 1e6


def size_mb(directory: Path) -> float:
    """Size of all files in the directory, in MB (10^6 bytes)."""
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file() and not p.is_symlink()) / 1e6


if __name__ == "__main__":
    sys.exit(main())
