"""From the name of a model to its files on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from neso.engine.weights.errors import ModelNotFound
from neso.models import SHIPPED_MODELS

TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
# What the engine reads. Some repositories hold the weights a second time in other layouts, at the top level
# as "consolidated*" and in folders. Folders with a number in front ("1_Pooling") are modules of
# sentence-transformers.
_WANTED = (*TOKENIZER_FILES, "*.safetensors")
_UNWANTED = ["consolidated*", "[!0-9]*/*"]

GGUF_SUFFIX = ".gguf"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(
    name_or_path: str | Path, revision: str | None = None, *, wanted: Sequence[str] = _WANTED
) -> Path:
    """The files of a model: a local directory or GGUF file, a model that ships, or the hub's "organization/name".

    Of the last, the files that fit `wanted` are cached here. A directory that holds a GGUF file and no safetensors
    stands for that file. Raises `ModelNotFound` when it is none of these, or the hub cannot be reached and the cache
    does not have it.
    """
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if name and path.is_dir():
        return _gguf_within(path) or path
    if path.suffix == GGUF_SUFFIX:
        if not path.is_file():
            raise ModelNotFound(f"{name}: there is no such file")
        return path
    if name in SHIPPED_MODELS:
        return SHIPPED_MODELS[name]
    if not _HUB_NAME.fullmatch(name):
        raise ModelNotFound(f"{name}: there is no such directory")
    return _download(name, revision, wanted)


def _gguf_within(directory: Path) -> Path | None:
    """The GGUF file that a directory is about; None for a checkpoint directory."""
    files = sorted(directory.glob(f"*{GGUF_SUFFIX}"))
    if not files or any(directory.glob("*.safetensors")):
        return None
    if len(files) > 1:
        listed = ", ".join(file.name for file in files)
        raise ModelNotFound(f"{directory}: holds several GGUF files, name one: {listed}")
    return files[0]


def _download(name: str, revision: str | None, wanted: Sequence[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(wanted), ignore_patterns=_UNWANTED)
        )
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{name}: access to this model is restricted; ask for it on huggingface.co and set HF_TOKEN"
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
