"""Print the path of the wheel that `./neso-up` installs instead of compiling, or nothing.

    .venv/bin/python scripts/find_wheel.py FOLDER

It has to fit this interpreter and machine, be of this checkout's version, and be newer than every source file: an
installation from a wheel does not see changes in the checkout.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pip._vendor.packaging.tags import sys_tags
from pip._vendor.packaging.utils import InvalidWheelFilename, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent


def source_files(root: Path) -> Iterator[Path]:
    yield from (root / "pyproject.toml", root / "CMakeLists.txt")
    for folder in (root / "csrc", root / "neso"):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix not in (".pyc", ".so"):
                yield path


def find_wheel(folder: Path, root: Path = ROOT) -> Path | None:
    """The wheel in `folder` with the most specific tags of those that fit the checkout at `root`."""
    found = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None, "pyproject.toml has no version"
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    candidates = []
    for path in folder.glob("neso_server-*.whl"):
        try:
            _, version, _, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        fits = [ranks[tag] for tag in tags if tag in ranks]
        if fits and str(version) == found[1]:
            candidates.append((min(fits), path))
    if not candidates:
        return None
    changed = max(path.stat().st_mtime for path in source_files(root))
    return min((found for found in candidates if found[1].stat().st_mtime >= changed), default=(0, None))[1]


if __name__ == "__main__":
    print(find_wheel(Path(sys.argv[1])) or "")
