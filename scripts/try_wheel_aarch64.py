"""Try an aarch64 wheel on an x86-64 machine: in a minimal Debian for arm64, emulated by QEMU, at each level of kernels.

    python scripts/try_wheel_aarch64.py dist/neso_server-0.1.0-cp311-cp311-manylinux_2_27_aarch64.whl

Needs root, `mmdebstrap` and `qemu-user-static`. The wheel has to fit the Python of the Debian release: that for 3.11
fits bookworm, that for 3.12 and newer fits trixie. `--root FOLDER` keeps the installation for further runs.

For each CPU that QEMU emulates, it checks which kernels the wheel selects, compares them with numpy, and asks the model
that ships with Neso. Prints times and sizes; exits non-zero if anything fails.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from try_wheel import QUESTION, ROOT, size_mb

# QEMU's name of a CPU, and the levels of kernels that it has, best first.
CPUS = {
    "cortex-a72": ["generic"],
    "neoverse-n1": ["neon_dot", "generic"],
    "max": ["neon_bf16", "neon_dot", "generic"],
}
KERNEL_TESTS = ROOT / "tests" / "engine" / "runners" / "test_native_kernels.py"
TEST_PACKAGES = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]
# pip downloads what fits any of these; a name without glibc's version does not include those with one.
MANYLINUX = [f"manylinux_2_{minor}_aarch64" for minor in (31, 28, 27, 26, 24, 17)] + ["manylinux2014_aarch64"]
GENERATE = f"""
import neso
llm = neso.LLM("neso-pilot")
sampling = neso.SamplingParams(temperature=0, max_tokens=24)
print(llm.generate([{QUESTION!r}], sampling, progress=False)[0].outputs[0].text.strip())
"""


@dataclass(frozen=True)
class EmulatedDebian:
    """A Debian for arm64 in a folder. Its programs run by QEMU, for which the kernel has to know QEMU (binfmt_misc)."""

    root: Path

    def make(self, release: str) -> None:
        start = time.perf_counter()
        command = ["mmdebstrap", "--quiet", "--variant=minbase", "--architectures=arm64"]
        subprocess.run([*command, "--include=python3,python3-venv", release, self.root], check=True)
        print(
            f"Debian {release}: {size_mb(self.root):.0f} MB in {time.perf_counter() - start:.0f} s",
            flush=True,
        )

    def run(self, *command: str, cpu: str = "max") -> str:
        """Run a program with its errors on this terminal; returns what it printed.

        In a mount namespace of its own, so that the mounts end with the program.
        """
        mount = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"'
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "QEMU_CPU": cpu}
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", mount, self.root, *command],
            check=True,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.strip()

    def install(self, wheel: Path) -> None:
        """Install the wheel and the packages of its tests in /neso, with packages that this machine downloads."""
        version = self.run("python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        download: list[str | Path] = [sys.executable, "-m", "pip", "download", "-q"]
        download += ["--disable-pip-version-check", "--only-binary", ":all:", "-c", ROOT / "constraints.txt"]
        download += ["--python-version", version, *(f"--platform={name}" for name in MANYLINUX)]
        subprocess.run([*download, "-d", self.root / "wheels", wheel, *TEST_PACKAGES], check=True)
        before, start = size_mb(self.root), time.perf_counter()
        if not (self.root / "neso").exists():
            self.run("python3", "-m", "venv", "/neso")
        pip = ("/neso/bin/pip", "install", "-q", "--no-index", "--find-links", "/wheels")
        self.run(*pip, f"/wheels/{wheel.name}")
        size, seconds = size_mb(self.root) - before, time.perf_counter() - start
        print(
            f"Python {version}: {wheel.name} of {wheel.stat().st_size / 1e6:.1f} MB and what it depends on "
            f"became {size:.0f} MB in {seconds:.0f} s",
            flush=True,
        )
        self.run(*pip, *TEST_PACKAGES)

    def try_cpu(self, cpu: str, levels: list[str]) -> None:
        start = time.perf_counter()
        found = self.run(
            "/neso/bin/python", "-c", "import neso._native as n; print(*n.supported_isas())", cpu=cpu
        ).split()
        if found != levels:
            raise SystemExit(f"{cpu}: kernels {found}, expected {levels}")
        print(
            f"{cpu}: imported in {time.perf_counter() - start:.0f} s, kernels {', '.join(found)}", flush=True
        )
        start = time.perf_counter()
        answer = self.run("/neso/bin/python", "-c", GENERATE, cpu=cpu)
        print(f"{cpu}: {answer!r} in {time.perf_counter() - start:.0f} s", flush=True)
        if "prefill" not in answer:
            raise SystemExit("the answer is not about prefill")
        # Lower levels are the best of another CPU.
        pytest = ("/neso/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-x")
        tests = self.run(
            *pytest, "-k", f"[{levels[0]}", "--timeout=0", f"/tests/{KERNEL_TESTS.name}", cpu=cpu
        )
        print(f"{cpu}: {tests.splitlines()[-1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--release", default="bookworm", help="release of Debian (default: bookworm)")
    parser.add_argument("--root", type=Path, help="folder of the Debian, made if it is missing, and kept")
    parser.add_argument("--cpus", nargs="+", choices=CPUS, default=list(CPUS), help="CPUs (default: all)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        debian = EmulatedDebian((arguments.root or Path(scratch) / "debian").resolve())
        if not debian.root.exists():
            debian.make(arguments.release)
        debian.install(arguments.wheel.resolve())
        (debian.root / "tests").mkdir(exist_ok=True)
        shutil.copy2(KERNEL_TESTS, debian.root / "tests")
        for cpu in arguments.cpus:
            debian.try_cpu(cpu, CPUS[cpu])


if __name__ == "__main__":
    main()
