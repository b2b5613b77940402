#!/usr/bin/env python
"""Fuzz the parsers of the server process with coverage-guided inputs (atheris, `pip install atheris`).

    python scripts/fuzz.py --minutes 60            all targets, each for its share of the time
    python scripts/fuzz.py --minutes 5 http1 gguf  two targets
    python scripts/fuzz.py --input FILE http1      run one input

The targets are in `tests/fuzz/fuzz_targets.py`. An input that fails is stored under `--findings`; after the defect is
fixed, it belongs in `tests/fuzz/corpus/TARGET/`, which `tests/fuzz/test_fuzz_targets.py` replays. Generated inputs
are kept in `--corpus` for the next run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import zlib
from pathlib import Path

FUZZ_TESTS = Path(__file__).parents[1] / "tests" / "fuzz"
MAX_INPUT = 4096
RSS_LIMIT_MIB = 1024
SECONDS_PER_INPUT = 10


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help="targets; default: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="time of all targets together")
    parser.add_argument(
        "--corpus", type=Path, default=Path("/tmp/neso-fuzz"), help="folder of generated inputs"
    )
    parser.add_argument(
        "--findings", type=Path, default=Path("/tmp/neso-fuzz/findings"), help="folder of failures"
    )
    parser.add_argument("--input", type=Path, help="run the target with this file only")
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # of the one target in this process
    arguments = parser.parse_args()
    sys.path.insert(0, str(FUZZ_TESTS))
    if arguments.seconds is not None:
        return fuzz(arguments.targets[0], arguments.seconds, arguments.corpus, arguments.findings)
    from fuzz_targets import TARGETS

    if arguments.input is not None:
        TARGETS[arguments.targets[0]].run(arguments.input.read_bytes())
        return 0
    names = arguments.targets or list(TARGETS)
    failed = []
    for name in names:
        seconds = 60 * arguments.minutes / len(names)
        started = time.monotonic()
        command = [sys.executable, __file__, name, "--seconds", str(seconds)]
        command += ["--corpus", str(arguments.corpus), "--findings", str(arguments.findings)]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
        lines = result.stderr.splitlines()
        summary = [line for line in lines if line.startswith(("Done", "stat::number_of_executed_units"))]
        print(
            f"{name}: {time.monotonic() - started:.0f} s, {summary[-1] if summary else 'failed'}", flush=True
        )
        if result.returncode:
            failed.append(name)
            print("\n".join([*result.stdout.splitlines()[-40:], *lines[-40:]]), flush=True)
    print(f"{len(names)} targets, failed: {', '.join(failed) or 'none'}")
    return bool(failed)


def fuzz(name: str, seconds: float, corpus: Path, findings: Path) -> int:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["neso", "hpack", "llguidance", "pickletools", "fuzz_targets"]):
        from fuzz_targets import TARGETS

    target = TARGETS[name]

    def run(data: bytes) -> None:
        try:
            target.run(data)
        except BaseException:
            (failures / f"{zlib.crc32(data):08x}").write_bytes(data)
            raise

    generated, failures = corpus / name, findings / name
    generated.mkdir(parents=True, exist_ok=True)
    failures.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.inputs()):
        (generated / f"seed-{number}").write_bytes(data)
    options = [
        f"-max_total_time={int(seconds)}",
        f"-max_len={MAX_INPUT}",
        f"-rss_limit_mb={RSS_LIMIT_MIB}",
        f"-timeout={SECONDS_PER_INPUT}",
        f"-artifact_prefix={failures}/",
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(generated)], run)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
