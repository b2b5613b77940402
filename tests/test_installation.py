"""`./neso-up` chooses a fitting wheel and reports failures; the documentation site has every page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from docs_site import external_links, navigation  # noqa: E402
from find_wheel import find_wheel  # noqa: E402

THIS = f"cp{sys.version_info.major}{sys.version_info.minor}"
PLATFORM = f"linux_{os.uname().machine}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose sources are older than any wheel."""
    for name in ("csrc/kernel.cpp", "neso/server.py", "CMakeLists.txt", "pyproject.toml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('[project]\nversion = "1.2.3"\n')
        os.utime(path, (1000, 1000))
    (tmp_path / "dist").mkdir()
    return tmp_path


def add_wheel(checkout: Path, name: str, modified: int = 2000) -> Path:
    path = checkout / "dist" / name
    path.touch()
    os.utime(path, (modified, modified))
    return path


def test_wheel_of_this_interpreter_is_preferred_to_the_stable_abi(checkout):
    add_wheel(checkout, f"neso_server-1.2.3-cp310-abi3-{PLATFORM}.whl")
    wheel = add_wheel(checkout, f"neso_server-1.2.3-{THIS}-{THIS}-{PLATFORM}.whl")
    assert find_wheel(checkout / "dist", checkout) == wheel


def test_stable_abi_of_an_older_python_fits(checkout):
    wheel = add_wheel(checkout, f"neso_server-1.2.3-cp310-abi3-{PLATFORM}.whl")
    assert find_wheel(checkout / "dist", checkout) == wheel


@pytest.mark.parametrize(
    "name",
    [
        f"neso_server-1.2.3-{THIS}-{THIS}-win_amd64.whl",
        f"neso_server-1.2.3-cp39-cp39-{PLATFORM}.whl",
        f"neso_server-1.2.4-{THIS}-{THIS}-{PLATFORM}.whl",
        "neso_server-1.2.3.whl",
    ],
)
def test_wheels_for_others_do_not_fit(checkout, name):
    add_wheel(checkout, name)
    assert find_wheel(checkout / "dist", checkout) is None


@pytest.mark.parametrize("changed", ["csrc/kernel.cpp", "neso/server.py", "pyproject.toml"])
def test_wheel_older_than_a_source_file_does_not_fit(checkout, changed):
    wheel = add_wheel(checkout, f"neso_server-1.2.3-{THIS}-{THIS}-{PLATFORM}.whl")
    os.utime(checkout / changed, (3000, 3000))
    assert find_wheel(checkout / "dist", checkout) is None
    os.utime(wheel, (3000, 3000))
    assert find_wheel(checkout / "dist", checkout) == wheel


def quietly(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    (folder / ".venv").mkdir()
    script = f"set -euo pipefail; . {ROOT}/scripts/setup.sh; quietly 'installing things' {command}; echo next"
    return subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True)


def test_output_of_an_installation_goes_to_its_log(tmp_path):
    result = quietly(tmp_path, "echo 580 lines")
    assert result.returncode == 0
    assert "580 lines" not in result.stdout
    assert "installing things" in result.stdout and result.stdout.endswith("next\n")
    assert (tmp_path / ".venv" / "install.log").read_text() == "580 lines\n"


def test_failed_installation_shows_its_reason_and_names_the_log(tmp_path):
    result = quietly(tmp_path, "bash -c 'echo no such package; exit 3'")
    assert result.returncode == 3
    assert "no such package" in result.stderr and ".venv/install.log" in result.stderr
    assert "next" not in result.stdout


def test_site_has_every_page_of_the_documentation():
    sections = navigation((ROOT / "docs" / "README.md").read_text())
    pages = [
        page for section in sections for entry in section.values() if entry != "README.md" for page in entry
    ]
    paths = [path for page in pages for path in page.values()]
    on_disk = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(paths) == on_disk - {"README.md"}
    assert len(paths) == len(set(paths)), "a page is in the navigation twice"


def test_links_to_files_outside_the_documentation_lead_to_the_repository():
    page = "[a](../../CONTRIBUTING.md#tests) [b](../guides/lora.md) [c](../../deploy/slurm/neso.sbatch)"
    assert external_links(page, "reference/models.md", "https://host/neso") == (
        "[a](https://host/neso/blob/main/CONTRIBUTING.md#tests) [b](../guides/lora.md)"
        " [c](https://host/neso/blob/main/deploy/slurm/neso.sbatch)"
    )


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material needs Python 3.11")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "site" / "search" / "search_index.json").is_file()


def test_checkout_finds_the_compiled_modules_of_a_wheel(tmp_path):
    installed = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages" / "neso"
    for folder in (installed, tmp_path / "neso"):
        folder.mkdir(parents=True)
    (installed / "_native.so").write_text("compiled")
    setup = Path(__file__).parents[1] / "scripts" / "setup.sh"
    script = f'set -eu; . "{setup}"; link_compiled_modules .venv/lib/python3*/site-packages/neso'
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True)
    assert (tmp_path / "neso" / "_native.so").read_text() == "compiled"
