"""Repository agents."""

from __future__ import annotations

import gc
import hashlib
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np
from core_requests import collect, index_of, send_request
from repository_builder import CONSTANT, IDENTITY_TENSORS

from neso.server.repository_agents import RepositoryAgent


def agent(name: str, **parameters: str) -> str:
    entries = " ".join(f"parameters {{ key: '{key}' value: '{value}' }}" for key, value in parameters.items())
    return IDENTITY_TENSORS + f"model_repository_agents {{ agents {{ name: '{name}' {entries} }} }}"


async def test_checksums(repository, start_core):
    repository.add("good")
    md5 = hashlib.md5((repository.path / "good" / "1" / "model.py").read_bytes()).hexdigest()
    for name, config in {
        "good": agent("checksum", **{"MD5:1/model.py": md5}),
        "other": agent("checksum", **{"MD5:1/model.py": "0" * 32}),
        "missing": agent("checksum", **{"MD5:1/none.py": md5}),
        "outside": agent("checksum", **{"MD5:../good/1/model.py": md5}),
        "algorithm": agent("checksum", **{"SHA1:1/model.py": md5}),
        "key": agent("checksum", MD5=md5),
        "unknown": agent("nope"),
    }.items():
        repository.add(name, config=config)
    core = await start_core()
    reasons = {entry.name: entry.reason for entry in core.repository_index()}
    assert reasons == {
        "good": "",
        "other": "repository agent 'checksum': Mismatched MD5 hash for file 1/model.py, expect: "
        f"{'0' * 32}, got: {md5}",
        "missing": "repository agent 'checksum': failed to open file for read 1/none.py: No such file or directory",
        "outside": "repository agent 'checksum': file '../good/1/model.py' must stay inside the model's folder",
        "algorithm": "repository agent 'checksum': Unsupported checksum algorithm: SHA1",
        "key": "repository agent 'checksum': failed to parse key: MD5, expected MD5:<file>",
        "unknown": "unable to find repository agent 'nope', built in are checksum",
    }


class Rewriter(RepositoryAgent):
    """Loads the model from a copy with different code, or fails."""

    folders: ClassVar[list[Path]] = []

    def load(self, directory: Path) -> Path:
        if "fail" in self.parameters:
            raise KeyError("key")
        self._scratch = TemporaryDirectory()
        self.folders.append(Path(self._scratch.name))
        copy = Path(self._scratch.name) / "model"
        shutil.copytree(directory, copy)
        (copy / "1" / "model.py").write_text(CONSTANT.format(value=self.parameters["value"]))
        return copy


async def test_third_party_agent(repository, start_core, monkeypatch):
    class Entry:
        @staticmethod
        def load() -> type[RepositoryAgent]:
            return Rewriter

    def entry_points(*, group: str, name: str) -> list[type[Entry]]:
        return [Entry] if (group, name) == ("neso.repository_agents", "rewriter") else []

    monkeypatch.setattr("neso.server.repository_agents.entry_points", entry_points)
    repository.add("m", config=agent("rewriter", value="7"))
    repository.add("bad", config=agent("rewriter", fail="yes"))
    core = await start_core(explicit=True, startup_models=("m", "bad"))
    assert index_of(core, "bad")[0].reason == "repository agent 'rewriter' failed: KeyError: 'key'"
    (response,) = await collect(send_request(core.model("m"), IN=np.zeros(1, np.float32)))
    assert response.output("OUT").array[0] == 7
    (folder,) = Rewriter.folders
    assert folder.is_dir()
    await core.unload_model("m")
    del response
    gc.collect()
    assert not folder.exists()
