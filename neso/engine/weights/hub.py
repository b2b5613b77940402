"""Resolves model names to local files: directories, GGUF files, bundled models, the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from neso.models import SHIPPED_MODELS

TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
# Some repositories contain a copy of the weights in another layout, as "consolidated*" or in folders. Folders that
# start with a digit ("1_Pooling") are modules of sentence-transformers.
_DOWNLOAD_PATTERNS = (*TOKENIZER_FILES, "*.safetensors")
_IGNORE_PATTERNS = ["consolidated*", "[!0-9]*/*"]

GGUF_SUFFIX = ".gguf"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelNotFound(Exception):
    """The name is neither a local directory nor a Hugging Face hub model that can be downloaded."""


def resolve_model(
    name_or_path: str | Path, revision: str | None = None, *, patterns: Sequence[str] = _DOWNLOAD_PATTERNS
) -> Path:
    """Return the path of a local directory or GGUF file, of a bundled model, or of a hub model "organization/name".

    Files of a hub model that match `patterns` are downloaded to the cache. A directory with a GGUF file and no
    safetensors files resolves to that file. Raises `ModelNotFound` if nothing matches, or if the model is not cached
    and the hub cannot be reached.
    """
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if name and path.is_dir():
        return _gguf_in(path) or path
    if path.suffix == GGUF_SUFFIX:
        if not path.is_file():
            raise ModelNotFound(f"{name}: there is no such file")
        return path
    if name in SHIPPED_MODELS:
        return SHIPPED_MODELS[name]
    if not _HUB_NAME.fullmatch(name):
        raise ModelNotFound(f"{name}: there is no such directory")
    return _download(name, revision, patterns)


def _gguf_in(directory: Path) -> Path | None:
    """Return the only GGUF file of a directory; None for a checkpoint directory."""
    files = sorted(directory.glob(f"*{GGUF_SUFFIX}"))
    if not files or any(directory.glob("*.safetensors")):
        return None
    if len(files) > 1:
        listed = ", ".join(file.name for file in files)
        raise ModelNotFound(f"{directory}: holds several GGUF files, name one: {listed}")
    return files[0]


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), ignore_patterns=_IGNORE_PATTERNS
            )
        )
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{name}: access to this model is restricted; request access on huggingface.co and set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{name}: the model has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{name}: neither a directory nor a model on huggingface.co (a private one needs HF_TOKEN)"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelNotFound(
            f"{name}: no such directory, not in the local cache, and the Hugging Face hub cannot be reached"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise ModelNotFound(f"{name}: cannot be downloaded: {error}") from error
