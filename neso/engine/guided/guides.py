"""Guided decoding as the engine core sees it: requests that wait for their grammar, and what sequences may say."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from neso.engine.core.draft import Draft
from neso.engine.core.request import EngineRequest
from neso.engine.core.sequence import Sequence
from neso.engine.guided.grammar import GrammarError, GuideError
from neso.engine.guided.guide import CompiledGrammar, Guide, MaskRows
from neso.engine.sampling.token_sampling import RowMasks
from neso.generation import GuidedDecoding

if TYPE_CHECKING:
    from neso.engine.guided.compiler import Compilation, GrammarCompiler


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """Whose grammars are compiled: a model (its tokenizer), the width of its logits, the seconds that one may take."""

    model: str
    vocab_size: int
    timeout: float

    def open(self) -> GrammarCompiler:
        """A compiler. What it needs is imported and loaded only when a grammar is there."""
        from neso.engine.guided.compiler import GrammarCompiler
        from neso.engine.text.tokenizer import Tokenizer

        return GrammarCompiler(partial(Tokenizer.from_model, Path(self.model)), self.vocab_size, self.timeout)


class Guides:
    """The grammars of the requests, and the guides of the sequences that are running.

    A request is held here until its grammar is compiled: the scheduler does not know it. `source` None is for an
    engine without text.
    """

    def __init__(self, source: GrammarSource | None = None) -> None:
        self._source = source
        self._compiler: GrammarCompiler | None = None
        self._held: dict[str, tuple[EngineRequest, Compilation]] = {}
        self._grammars: dict[str, CompiledGrammar] = {}
        self._guides: dict[int, Guide] = {}
        self._failed: dict[int, GuideError] = {}

    def prepare(self) -> None:
        """Load what the first grammar would load, and wait for it.

        Making llguidance's tokenizer keeps the interpreter's lock: the engine would stand still that long.
        """
        if self._source is not None and self._compiler is None:
            self._compiler = self._source.open()
            self._compiler.compile(GuidedDecoding(choice=("ready",))).done.wait()

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._held)

    def hold(self, request: EngineRequest) -> bool:
        """Begin with a request's grammar; whether the request has to wait for it (`take_ready`).

        Raises `GrammarError` for a grammar that is known to be bad, `ValueError` if the request's id is in use.
        """
        guided = request.sampling.guided_decoding
        if guided is None:
            return False
        if request.request_id in self._held or request.request_id in self._grammars:
            raise ValueError(f"request id '{request.request_id}' is in use")
        if self._source is None:
            raise GrammarError("this engine has no tokenizer, which guided decoding needs")
        if self._compiler is None:
            self._compiler = self._source.open()
        compilation = self._compiler.compile(guided)
        if compilation.done.is_set():
            self._keep(request, compilation)
            return False
        self._held[request.request_id] = request, compilation
        return True

    def take_ready(self) -> list[tuple[EngineRequest, GrammarError | None]]:
        """The requests whose grammars are done now, with what is wrong with them."""
        ready: list[tuple[EngineRequest, GrammarError | None]] = []
        for name in [name for name, (_, compilation) in self._held.items() if compilation.done.is_set()]:
            request, compilation = self._held.pop(name)
            try:
                self._keep(request, compilation)
                ready.append((request, None))
            except GrammarError as error:
                ready.append((request, error))
        return ready

    def wait(self, timeout: float) -> None:
        """Wait for a grammar, if nothing else is to be done, for so many seconds at most."""
        if self._held and self._compiler is not None:
            self._compiler.wait(timeout)

    def drop(self, request_id: str) -> None:
        """Forget a request, held or not, when its last sequence is gone."""
        self._held.pop(request_id, None)
        self._grammars.pop(request_id, None)

    def _keep(self, request: EngineRequest, compilation: Compilation) -> None:
        result = compilation.result
        if not isinstance(result, CompiledGrammar):
            raise result or GrammarError("cannot be compiled")
        self._grammars[request.request_id] = result

    # -- sequences ----------------------------------------------------------------------------------------------

    def of(self, sequence: Sequence) -> Guide | None:
        """The guide of a sequence, as of its last token; None if it is free."""
        guide = self._guides.get(sequence.id)
        if guide is None and (grammar := self._grammars.get(sequence.request.request_id)) is not None:
            guide = self._guides[sequence.id] = grammar.start(sequence.request.end_token_ids)
        return guide

    def row_masks(self, sequences: list[Sequence]) -> RowMasks | None:
        """What the next tokens of `sequences`, the rows of a step's logits, may be; None if all are free.

        Called when the model has been started: on a device it runs in the meantime. A sequence whose mask fails is
        not masked: `advance` tells.
        """
        if not self._grammars:
            return None
        guided = [(row, s, guide) for row, s in enumerate(sequences) if (guide := self.of(s)) is not None]
        if not guided:
            return None
        masks = np.zeros((len(guided), guided[0][2].mask_width), np.int32)
        for index, (_, sequence, guide) in enumerate(guided):
            try:
                guide.fill(masks, index)
            except GuideError as error:
                self._failed[sequence.id] = error
                masks[index] = -1
        return RowMasks(np.array([row for row, _, _ in guided], np.int32), masks)

    def masks_along(
        self, sequences: list[Sequence], drafts: list[Draft | None], num_drafts: list[int]
    ) -> RowMasks | None:
        """As `row_masks`, with 1 + num_drafts[i] rows for a sequence: behind its last token, and each of its draft.

        A token that does not fit is never accepted, so what stands behind it is not masked.
        """
        if not any(num_drafts):
            return self.row_masks(sequences)
        if not self._grammars:
            return None
        rows: list[int] = []
        masks: list[MaskRows] = []
        first = 0
        for sequence, draft, count in zip(sequences, drafts, num_drafts, strict=True):
            guide = self.of(sequence)
            if guide is not None:
                rows += range(first, first + 1 + count)
                masks.append(self._masks_of(sequence, guide, draft if count else None, count))
            first += 1 + count
        return RowMasks(np.array(rows, np.int32), np.concatenate(masks)) if rows else None

    def _masks_of(self, sequence: Sequence, guide: Guide, draft: Draft | None, count: int) -> MaskRows:
        masks = np.full((1 + count, guide.mask_width), -1, np.int32)
        try:
            if draft is None:
                guide.fill(masks, 0)
            elif draft.tree is None:
                guide.fill_after(draft.token_ids[:count], masks, 0)
            else:
                along = np.empty((1 + max(draft.tree.depths), guide.mask_width), np.int32)
                for node in range(-1, count):
                    path = draft.path(node)
                    if guide.fill_after(path, along, 0) == 1 + len(path):
                        masks[1 + node] = along[len(path)]
        except GuideError as error:
            self._failed[sequence.id] = error
            masks[:] = -1
        return masks

    def advance(self, sequence: Sequence, token_id: int, *, ends: bool) -> bool:
        """Take note of a sequence's next token, which `ends` it or is text; whether the text is complete by it.

        Raises `GuideError`.
        """
        if not self._grammars:
            return False
        failed = self._failed.pop(sequence.id, None)
        if failed is not None:
            raise failed
        guide = None if ends else self.of(sequence)
        return guide is not None and guide.advance(token_id)

    @property
    def sequence_ids(self) -> set[int]:
        """Sequences of which something is remembered."""
        return {*self._guides, *self._failed}

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that is released."""
        self._guides.pop(sequence.id, None)
        self._failed.pop(sequence.id, None)
