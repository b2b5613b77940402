"""Model repositories in cloud storage. Models are copied to the local disk when they are loaded."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from neso.server.errors import InvalidArgument, NotFound, Unavailable, Unsupported
from neso.server.repository.source import Fingerprint, ModelSource, Scratch, make_scratch

_S3_ENDPOINT = re.compile(r"^(?:(?P<protocol>https?)://)?(?P<host>[^/:]+:\d+)/(?P<path>.+)$")


class Bucket(NamedTuple):
    """Location for fsspec: protocol, path and file-system options."""

    protocol: str
    path: str
    options: dict[str, Any]


def is_cloud_uri(uri: str) -> bool:
    """Return whether a repository is a URI rather than a directory."""
    return "://" in uri


def parse_uri(uri: str) -> Bucket:
    """Parse a repository URI. Raises `InvalidArgument`.

    Triton's formats are `s3://bucket/path`, `s3://https://host:port/bucket/path`, `gs://bucket/path` and
    `as://account/container/path`. Other protocols are passed to fsspec unchanged.
    """
    protocol, _, path = uri.partition("://")
    path = path.rstrip("/")
    if not protocol or not path:
        raise InvalidArgument(f"model repository '{uri}': expected PROTOCOL://BUCKET/PATH")
    if protocol == "s3":
        endpoint = _S3_ENDPOINT.match(path)
        if endpoint is None:
            return Bucket("s3", path, {})
        url = f"{endpoint['protocol'] or 'http'}://{endpoint['host']}"
        return Bucket("s3", endpoint["path"].strip("/"), {"client_kwargs": {"endpoint_url": url}})
    if protocol == "as":
        account, _, container = path.partition("/")
        if not container:
            raise InvalidArgument(f"model repository '{uri}': expected as://ACCOUNT/CONTAINER/PATH")
        options = {"account_name": account.partition(".")[0]}
        if key := os.environ.get("AZURE_STORAGE_KEY"):
            options["account_key"] = key
        return Bucket("abfs", container, options)
    return Bucket(protocol, path, {})


class CloudRepository:
    """A repository on an fsspec file system, with one folder per model. All methods except `listed` block."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        bucket = parse_uri(uri)
        self._path = bucket.path
        self._files = _open(bucket, uri)
        self._listed: list[str] = []

    def check(self) -> None:
        """Raise `NotFound` if the folder does not exist, `Unavailable` if it cannot be read."""
        try:
            if not self._files.isdir(self._path):
                raise NotFound(f"model repository '{self.uri}' is not a directory")
            self.folders()
        except OSError as error:
            raise Unavailable(f"model repository '{self.uri}' cannot be read: {error}") from None

    def folders(self) -> list[str]:
        """Return the names of the model folders. Raises `OSError`."""
        self._files.invalidate_cache()
        found = self._files.ls(self._path, detail=True)
        names = [_name(entry["name"]) for entry in found if entry["type"] == "directory"]
        self._listed = [name for name in names if not name.startswith(".")]
        return list(self._listed)

    def listed(self) -> list[str]:
        """Return the last result of `folders`; does not block."""
        return list(self._listed)

    def holds(self, folder: str) -> bool:
        """Return whether the repository contains the folder. Raises `OSError`."""
        self._files.invalidate_cache()
        return bool(self._files.isdir(f"{self._path}/{folder}"))

    def source(self, name: str, folder: str) -> ModelSource:
        """Return the source of the model in a folder, which is copied when it is loaded. Raises `OSError`."""
        root = f"{self._path}/{folder}"
        found = self._files.find(root, detail=True)
        skip = len(self._files._strip_protocol(root)) + 1
        # The fields of `info` (size, time, entity tag) differ between file systems.
        fingerprint = Fingerprint.of_files((path[skip:], str(info)) for path, info in found.items())
        return ModelSource(
            name,
            Path(self.uri, folder),
            fingerprint=fingerprint,
            renamed=name != folder,
            fetch=partial(self._fetch, root),
        )

    def _fetch(self, root: str) -> Scratch:
        scratch = make_scratch()
        try:
            self._files.get(f"{root}/", f"{scratch.name}/", recursive=True)
        except Exception as error:  # file systems raise various exceptions
            scratch.cleanup()
            raise Unavailable(f"failed to copy '{self.uri}/{_name(root)}' to this machine: {error}") from None
        return scratch


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _open(bucket: Bucket, uri: str) -> Any:
    try:
        import fsspec  # type: ignore[import-untyped]

        return fsspec.filesystem(bucket.protocol, **bucket.options)
    except ImportError as error:
        raise Unsupported(f"model repository '{uri}' needs the extra 'neso-server[cloud]': {error}") from None
    except ValueError as error:
        raise InvalidArgument(f"model repository '{uri}': {error}") from None
