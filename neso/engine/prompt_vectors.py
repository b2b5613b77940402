"""Vectors of a request that stand in place of tokens: checked, and put where the prompt has them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.core.request import PLACEHOLDER, InputEmbeddings
from neso.engine.ipc.messages import EngineInfo
from neso.generation import GenerationRequest, InvalidParameter

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptVectors:
    """What of a prompt comes as vectors, for a model with these limits."""

    info: EngineInfo

    def whole_prompt(self, request: GenerationRequest) -> tuple[list[int], InputEmbeddings]:
        """Placeholders and rows of `prompt_embeds`. Raises `InvalidParameter`."""
        if request.prompt:
            raise InvalidParameter("prompt_embeds", "is a whole prompt: 'prompt' must be empty beside it")
        if request.prompt_embedding_table is not None:
            raise InvalidParameter("prompt_embeds", "cannot be given with prompt_embedding_table")
        rows = self._rows("prompt_embeds", request.prompt_embeds)
        positions = np.arange(len(rows), dtype=np.int32)
        return [PLACEHOLDER] * len(rows), InputEmbeddings.of(positions, rows)

    def with_table(
        self, request: GenerationRequest, token_ids: list[int]
    ) -> tuple[list[int], InputEmbeddings | None]:
        """The prompt with rows of `prompt_embedding_table` for its virtual tokens. Raises `InvalidParameter`."""
        table = self._rows("prompt_embedding_table", request.prompt_embedding_table)
        size, vocab_size = request.prompt_vocab_size, self.info.vocab_size
        if size is not None and size != len(table):
            raise InvalidParameter(
                "prompt_vocab_size", f"is {size}, but prompt_embedding_table has {len(table)} rows"
            )
        if isinstance(request.prompt, str):
            token_ids = [*range(vocab_size, vocab_size + len(table)), *token_ids]
        ids = np.array(token_ids, np.int64)
        virtual = np.flatnonzero(ids >= vocab_size).astype(np.int32)
        chosen = ids[virtual] - vocab_size
        if len(chosen) and chosen.max() >= len(table):
            raise InvalidParameter(
                "prompt",
                f"token {chosen.max() + vocab_size} is beyond the vocabulary of {vocab_size} and the {len(table)} "
                "rows of prompt_embedding_table",
            )
        ids[virtual] = PLACEHOLDER
        placed: list[int] = ids.tolist()
        return placed, InputEmbeddings.of(virtual, table[chosen]) if len(virtual) else None

    def _rows(self, field: str, values: npt.NDArray[np.floating] | None) -> Float32Array:
        assert values is not None
        if "input_embeddings" not in self.info.capabilities:
            raise InvalidParameter(
                field, f"the runner of this model ({self.info.runner}) takes token ids only"
            )
        rows = np.asarray(values)
        hidden_size = self.info.hidden_size
        if rows.ndim == 3 and len(rows) == 1:  # a batch of one
            rows = rows[0]
        if rows.ndim == 2 and len(rows) == 1 and hidden_size and rows.size % hidden_size == 0:
            rows = rows.reshape(-1, hidden_size)  # flat, as JSON carries it
        if rows.ndim != 2 or rows.shape[1] != hidden_size or not len(rows):
            raise InvalidParameter(
                field, f"must have the shape [rows, {hidden_size}], not {list(rows.shape)}"
            )
        if rows.dtype.kind not in "fV":  # bfloat16 is of kind V
            raise InvalidParameter(field, f"must be of a float dtype, not {rows.dtype}")
        rows = rows.astype(np.float32)
        if not np.isfinite(rows).all():
            raise InvalidParameter(field, "has values that are not finite")
        return rows
