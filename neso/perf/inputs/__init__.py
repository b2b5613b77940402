"""Input sources: synthetic prompts, files, datasets, traces, images, passages, tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neso.perf.errors import PerfError

if TYPE_CHECKING:
    from neso.engine.text.tokenizer import Tokenizer
    from neso.perf.inputs.options import InputOptions
    from neso.perf.requests import InputSource, PerfRequest


def open_source(options: InputOptions, endpoint_type: str, models: tuple[str, ...] = ()) -> InputSource:
    """Return the source of requests that the options describe. Raises `PerfError`.

    `endpoint_type` decides what synthetic requests contain: prompts, texts of embeddings, or queries with passages.
    """
    from neso.perf.inputs.synthetic import SyntheticSource, endpoint_kind

    if options.input_file is not None and options.input_dataset is not None:
        raise PerfError("--input-file and --input-dataset cannot be combined")
    kind = endpoint_kind(endpoint_type)
    source: InputSource
    if options.input_file is not None:
        from neso.perf.inputs.files import FileSource

        source = FileSource(options, kind, models)
    elif options.input_dataset is not None:
        from neso.perf.inputs.datasets import DatasetSource

        source = DatasetSource(options, kind, models)
    else:
        source = SyntheticSource(options, kind, models)
    return with_extra_inputs(source, options)


def with_extra_inputs(source: InputSource, options: InputOptions) -> InputSource:
    """Return the source with the fields of `--extra-inputs` in each request. Raises `PerfError`."""
    extra = parse_extra_inputs(options.extra_inputs)
    return _WithExtra(source, extra) if extra else source


@dataclass(frozen=True)
class _WithExtra:
    """Adds fields to the requests of a source. Fields of a request take precedence."""

    source: InputSource
    extra: dict[str, Any]

    def requests(self) -> Iterator[PerfRequest]:
        for request in self.source.requests():
            request.extra = {**self.extra, **request.extra}
            yield request


@dataclass(frozen=True)
class WithTokenIds:
    """Adds the token ids of prompts, for models that take no text. Special tokens are not added."""

    source: InputSource
    tokenizer: Tokenizer

    def requests(self) -> Iterator[PerfRequest]:
        for request in self.source.requests():
            if request.token_ids is None and request.text:
                text = f"{request.system}\n{request.text}" if request.system else request.text
                request.token_ids = self.tokenizer.encode(text, add_special_tokens=False)
            yield request


def parse_extra_inputs(texts: Sequence[str]) -> dict[str, Any]:
    """Parse NAME:VALUE pairs and JSON objects; a value that is JSON is parsed. Raises `PerfError`."""
    found: dict[str, Any] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            try:
                found.update(json.loads(text))
            except ValueError as error:
                raise PerfError(f"--extra-inputs {text}: not a JSON object: {error}") from None
            continue
        name, separator, value = text.partition(":")
        if not separator or not name:
            raise PerfError(f"--extra-inputs {text}: expected NAME:VALUE or a JSON object")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
