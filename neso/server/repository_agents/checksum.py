"""The agent that refuses a model whose files are not the expected ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

from neso.server.errors import InvalidArgument, Unsupported
from neso.server.repository.names import stays_inside
from neso.server.repository_agents.agent import RepositoryAgent


class ChecksumAgent(RepositoryAgent):
    """Parameters: `MD5:<file, relative to the model's folder>` to the file's hash, in hexadecimal."""

    def load(self, directory: Path) -> Path:
        for key, expected in sorted(self.parameters.items()):
            algorithm, colon, filename = key.partition(":")
            if not colon:
                raise InvalidArgument(f"failed to parse key: {key}, expected MD5:<file>")
            if algorithm.lower() != "md5":
                raise Unsupported(f"Unsupported checksum algorithm: {algorithm}")
            found = _md5(directory, filename)
            if found != expected.strip().lower():
                raise InvalidArgument(
                    f"Mismatched MD5 hash for file {filename}, expect: {expected}, got: {found}"
                )
        return directory


def _md5(directory: Path, filename: str) -> str:
    if not stays_inside(filename):
        raise InvalidArgument(f"file '{filename}' must stay inside the model's folder")
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with open(directory / filename, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise InvalidArgument(f"failed to open file for read {filename}: {error.strerror}") from None
    return digest.hexdigest()
