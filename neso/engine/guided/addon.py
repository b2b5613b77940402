"""Guided decoding as an add-on of the engine core: waits for grammars, masks logits, and advances grammar states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from neso.engine.core.addon import Addon, Failures, RequestError
from neso.engine.core.scheduler import Scheduler
from neso.engine.core.sequence import Sequence
from neso.engine.core.step import DraftTokens
from neso.engine.guided.grammar import GrammarError, MatcherError
from neso.engine.guided.grammar_matcher import CompiledGrammar, GrammarMatcher, MaskRows
from neso.engine.sampling.token_sampling import RowMasks
from neso.generation import GuidedDecoding

if TYPE_CHECKING:
    from neso.engine.guided.compiler import Compilation, GrammarCompiler


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The model for which grammars are compiled, and its vocabulary size. `timeout`: seconds to compile a grammar."""

    model: str
    vocab_size: int
    timeout: float

    def open(self) -> GrammarCompiler:
        """Create a compiler, which imports llguidance and loads the tokenizer with the first grammar."""
        from neso.engine.guided.compiler import GrammarCompiler
        from neso.engine.text.tokenizer import Tokenizer

        return GrammarCompiler(partial(Tokenizer.from_model, Path(self.model)), self.vocab_size, self.timeout)


@dataclass(slots=True, eq=False)
class _GuidedSequence:
    """State of a sequence. `grammar`: None while it is being compiled."""

    compilation: Compilation
    grammar: CompiledGrammar | None = None
    matcher: GrammarMatcher | None = None


class GuidedDecodingAddon(Addon):
    """Holds sequences until their grammars are compiled. `source`: None if the engine has no tokenizer."""

    def __init__(self, source: GrammarSource | None = None) -> None:
        self._source = source
        self._compiler: GrammarCompiler | None = None
        self._compiling: list[Sequence] = []

    def prepare_compiler(self) -> None:
        """Start the compiler before the first grammar, and wait until it is ready.

        Building llguidance's tokenizer holds the GIL, which would stall the engine.
        """
        if self._source is not None and self._compiler is None:
            self._compiler = self._source.open()
            self._compiler.compile(GuidedDecoding(choice=("ready",))).done.wait()

    # -- waiting for grammars -----------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        guided = sequence.request.sampling.guided_decoding
        if guided is None:
            return
        if self._source is None:
            raise RequestError("this engine has no tokenizer, which guided decoding needs", guided.field)
        if self._compiler is None:
            self._compiler = self._source.open()
        try:
            state = _GuidedSequence(self._compiler.compile(guided))
            if state.compilation.done.is_set():
                state.grammar = _compiled(state.compilation)
        except GrammarError as error:
            raise RequestError(str(error), guided.field) from None
        sequence.addons[self] = state
        if state.grammar is None:
            self._compiling.append(sequence)

    def begin_step(self, scheduler: Scheduler) -> Failures:
        failures: Failures = []
        if not self._compiling:
            return failures
        still_compiling = []
        for sequence in self._compiling:
            if sequence.released:
                continue
            state: _GuidedSequence = sequence.addons[self]
            if not state.compilation.done.is_set():
                still_compiling.append(sequence)
                continue
            try:
                state.grammar = _compiled(state.compilation)
            except GrammarError as error:
                failures.append((sequence, _request_error(sequence, error)))
        self._compiling = still_compiling
        return failures

    def can_start(self, sequence: Sequence) -> bool:
        state: _GuidedSequence | None = sequence.addons.get(self)
        return state is None or state.grammar is not None

    def wait(self, timeout: float) -> None:
        if self._compiling and self._compiler is not None:
            self._compiler.wait(timeout)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        state: _GuidedSequence | None = parent.addons.get(self)
        if state is not None:
            child.addons[self] = _GuidedSequence(state.compilation, state.grammar)

    # -- tokens -------------------------------------------------------------------------------------------------

    def row_masks(
        self, sequences: list[Sequence], drafts: list[DraftTokens | None], num_drafts: list[int]
    ) -> RowMasks | None:
        """Return masks of the logits rows, 1 + num_drafts[i] for sequence i; None if no row is masked.

        Called after the model was launched, so masks are computed while a device runs the model. If computing a mask
        fails, the sequence is not masked and ends with the error. Rows after an invalid draft token are not masked,
        because the token is rejected.
        """
        rows: list[int] = []
        masks: list[MaskRows] = []
        first = 0
        for sequence, draft, count in zip(sequences, drafts, num_drafts, strict=True):
            state: _GuidedSequence | None = sequence.addons.get(self)
            if state is not None and not sequence.released:
                rows += range(first, first + 1 + count)
                masks.append(self._masks_of(sequence, state, draft if count else None, count))
            first += 1 + count
        return RowMasks(np.array(rows, np.int32), np.concatenate(masks)) if rows else None

    def _masks_of(
        self, sequence: Sequence, state: _GuidedSequence, draft: DraftTokens | None, count: int
    ) -> MaskRows:
        matcher = _matcher(sequence, state)
        masks = np.zeros((1 + count, matcher.mask_width), np.int32)
        try:
            if draft is None:
                matcher.fill(masks, 0)
            elif draft.is_chain:
                masks[:] = -1
                matcher.fill_after(draft.token_ids[:count], masks, 0)
            else:
                masks[:] = -1
                paths = [draft.path(node) for node in range(-1, count)]
                along = np.empty((1 + max(map(len, paths)), matcher.mask_width), np.int32)
                for node, path in enumerate(paths, start=-1):
                    if matcher.fill_after(path, along, 0) == 1 + len(path):
                        masks[1 + node] = along[len(path)]
        except MatcherError as error:
            sequence.error = _request_error(sequence, error)
            masks[:] = -1
        return masks

    def accept_token(self, sequence: Sequence, token_id: int, *, ends: bool) -> bool:
        """Advance the grammar by the next token of a sequence; returns whether the text is complete.

        `ends`: the token ends the sequence and is not text. Raises `RequestError`.
        """
        state: _GuidedSequence | None = sequence.addons.get(self)
        if state is None:
            return False
        try:
            return not ends and _matcher(sequence, state).advance(token_id)
        except MatcherError as error:
            raise _request_error(sequence, error) from None


def _compiled(compilation: Compilation) -> CompiledGrammar:
    """Return the result of a compilation. Raises `GrammarError`."""
    result = compilation.result
    if not isinstance(result, CompiledGrammar):
        raise result or GrammarError("cannot be compiled")
    return result


def _matcher(sequence: Sequence, state: _GuidedSequence) -> GrammarMatcher:
    if state.matcher is None:
        assert state.grammar is not None, "a sequence started before its grammar was compiled"
        state.matcher = state.grammar.start(sequence.request.end_token_ids)
        try:
            for token_id in sequence.request.output_token_ids:  # sampled by another engine
                state.matcher.advance(token_id)
        except MatcherError as error:
            sequence.error = _request_error(sequence, error)
    return state.matcher


def _request_error(sequence: Sequence, error: Exception) -> RequestError:
    guided = sequence.request.sampling.guided_decoding
    return RequestError(str(error), "guided_decoding" if guided is None else guided.field)
