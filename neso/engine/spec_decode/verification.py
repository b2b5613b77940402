"""Verification of draft tokens.

Without a draft distribution, a draft token is accepted if it equals the token sampled at its position. The output is
the same as without drafts, because the random number of each position is the same.

A token drawn from a distribution q is accepted with the probability min(1, p / q); in place of the first rejected one,
a token is drawn from max(p - q, 0) (arXiv 2211.17192, 2302.01318). The output has the model's distribution p, but the
same seed gives other tokens than without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.runners.base import Logits
from neso.engine.sampling.sampler import SampledToken, Sampler, masked_row, scored
from neso.engine.sampling.state import SamplingState
from neso.engine.sampling.token_sampling import INVALID_TOKEN, RowMasks, draw, probabilities_of
from neso.engine.spec_decode.draft import Draft

Probabilities = npt.NDArray[np.floating[Any]]


def draw_one(weights: Probabilities, uniform: float) -> int:
    """Draw an index with weights float[V], which need not sum to 1."""
    return int(draw(weights[None], np.array([uniform]))[0])


FloatRow = npt.NDArray[np.float32]


@dataclass(slots=True)
class Verified:
    """Result of a step for one sequence.

    - tokens: at least one; all but the last are accepted drafts
    - path: indices of the accepted tokens in the draft, ascending
    - row: logits row of the last token
    """

    tokens: list[SampledToken]
    path: list[int] = field(default_factory=list)
    row: int = 0


@dataclass(slots=True)
class _Rows:
    """The logits rows of a sequence: one after the last known token, and one after each draft token.

    `uniforms` and `states` are per row; rows of equal depth in a tree have the same random number.
    """

    first: int
    draft: Draft | None
    num_drafts: int
    uniforms: list[float]
    states: list[SamplingState]

    @property
    def parents(self) -> list[int]:
        """For each draft token, the row that verifies it, relative to `first`."""
        if self.draft is not None and self.draft.tree is not None:
            return [parent + 1 for parent in self.draft.tree.parents[: self.num_drafts]]
        return list(range(self.num_drafts))


def verify(
    sampler: Sampler,
    logits: Logits,
    states: list[SamplingState],
    drafts: list[Draft | None],
    num_drafts: list[int],
    masks: RowMasks | None = None,
) -> list[Verified]:
    """Sample the new tokens of each sequence from its rows of float32[R, V] (which may be changed).

    Sequence i has 1 + num_drafts[i] rows in the logits and in the masks. Its state is updated with the new tokens.
    """
    groups = []
    first = 0
    for state, draft, count in zip(states, drafts, num_drafts, strict=True):
        groups.append(_rows_of(first, state, draft, count))
        first += 1 + count
    raw = _raw_rows(logits, groups)
    sampled = sampler.sample(logits, [state for group in groups for state in group.states], masks)
    verified = []
    for group, state in zip(groups, states, strict=True):
        tokens = sampled[group.first : group.first + 1 + group.num_drafts]
        if group.draft is None or not group.num_drafts:
            result = Verified(tokens, row=group.first)
        elif _requires_equality(group.draft, state):
            result = _accept_matching(group, tokens)
        else:
            result = _rejection_sample(group, tokens, _masked_rows(group, logits, masks), state, raw)
        if group.num_drafts:
            _record_tokens(group, state, result)
        verified.append(result)
    return verified


def _requires_equality(draft: Draft, state: SamplingState) -> bool:
    """Whether tokens are compared for equality; always for greedy sequences, whatever proposed the draft."""
    return draft.acceptance_threshold is None and (draft.probabilities is None or state.params.greedy)


def _rows_of(first: int, state: SamplingState, draft: Draft | None, count: int) -> _Rows:
    if draft is None or not count:
        return _Rows(first, None, 0, [], [state])
    depths = [0, *(draft.tree.depths[:count] if draft.tree is not None else range(1, count + 1))]
    # The first nodes of a tree need not be as deep as its last ones.
    uniforms = [0.0 if state.params.greedy else state.uniform() for _ in range(max(depths) + 1)]
    rows = _Rows(first, draft, count, uniforms, [state.after((), uniforms[0])])
    for parent, token, depth in zip(rows.parents, draft.token_ids[:count], depths[1:], strict=True):
        rows.states.append(rows.states[parent].after((token,), uniforms[depth]))
    return rows


def _raw_rows(logits: Logits, groups: list[_Rows]) -> dict[int, FloatRow]:
    """Copy the unmodified logits rows that may be needed for the log probability of a replacement token."""
    raw = {}
    for group in groups:
        draft = group.draft
        state = group.states[0]
        if draft is not None and state.needs_scores and not _requires_equality(draft, state):
            for row in range(group.first, group.first + 1 + group.num_drafts):
                raw[row] = np.array(logits[row])
    return raw


def _masked_rows(group: _Rows, logits: Logits, masks: RowMasks | None) -> list[FloatRow]:
    """Return the rows of a sequence with masks applied; penalties have been applied already."""
    return [masked_row(logits, group.first + number, masks) for number in range(1 + group.num_drafts)]


def _accept_matching(group: _Rows, tokens: list[SampledToken]) -> Verified:
    """Accept the draft tokens that equal the sampled ones."""
    assert group.draft is not None
    children: dict[tuple[int, int], int] = {}
    for number, parent in enumerate(group.parents):
        children.setdefault((parent, group.draft.token_ids[number]), number)
    result = Verified([tokens[0]], row=group.first)
    node: int | None = children.get((0, tokens[0].token_id))
    # Draft tokens are valid token ids, so INVALID_TOKEN never matches.
    while node is not None:
        token = tokens[node + 1]
        if token.token_id == INVALID_TOKEN:
            # The tokens before are valid. The next step computes the same logits first, and reports the error.
            break
        result.path.append(node)
        result.tokens.append(token)
        result.row = group.first + node + 1
        node = children.get((node + 1, token.token_id))
    return result


def _rejection_sample(
    group: _Rows,
    tokens: list[SampledToken],
    rows: list[FloatRow],
    state: SamplingState,
    raw: dict[int, FloatRow],
) -> Verified:
    """Accept draft tokens in order, each with its acceptance probability."""
    draft = group.draft
    assert draft is not None
    acceptance_uniforms = [state.uniform() for _ in range(group.num_drafts)]
    accepted_tokens: list[SampledToken] = []
    for number in range(group.num_drafts):
        row, token = group.first + number, draft.token_ids[number]
        if tokens[number].token_id == INVALID_TOKEN:
            break
        target = probabilities_of(rows[number], state.params, group.states[number].top_p)
        accepted, replacement = _accept_or_replace(
            draft, number, target, acceptance_uniforms[number], group.uniforms[number]
        )
        if not accepted:
            last = tokens[number]
            if replacement is not None:
                last = _scored_token(replacement, group, number, raw, rows)
            return Verified([*accepted_tokens, last], list(range(number)), row)
        accepted_tokens.append(_scored_token(token, group, number, raw, rows))
    else:
        number = group.num_drafts
    if tokens[number].token_id == INVALID_TOKEN and accepted_tokens:
        # As in _accept_matching: the result ends with an accepted token, and the invalid logits after it are computed
        # again.
        return Verified(accepted_tokens, list(range(number - 1)), group.first + number - 1)
    return Verified([*accepted_tokens, tokens[number]], list(range(number)), group.first + number)


def _accept_or_replace(
    draft: Draft, number: int, target: Probabilities, acceptance_uniform: float, uniform: float
) -> tuple[bool, int | None]:
    """Return whether a draft token is accepted, and if not, its replacement; None for the sampled token."""
    token = draft.token_ids[number]
    drafted = None if draft.probabilities is None else draft.probabilities[number]
    draft_probability = 1.0 if drafted is None else float(drafted[token])
    if draft.acceptance_threshold is not None:
        # A token with probability 0 is never accepted, even if its draft probability is tiny.
        return bool(0 < target[token] >= draft.acceptance_threshold * draft_probability), None
    assert drafted is not None
    if acceptance_uniform * draft_probability < target[token]:
        return True, None
    residual = np.maximum(target - drafted, 0)
    # If both distributions are equal, rounding may leave an empty residual.
    return False, draw_one(residual if residual.any() else target, uniform)


def _scored_token(
    token: int, group: _Rows, number: int, raw: dict[int, FloatRow], rows: list[FloatRow]
) -> SampledToken:
    row = raw.get(group.first + number)
    if row is None:
        return SampledToken(token)
    state = group.states[number]
    return scored(token, row, state.params, rows[number], state.top_p)


def _record_tokens(group: _Rows, state: SamplingState, result: Verified) -> None:
    """Count the new tokens, and return the random numbers of positions that were not reached."""
    for token in result.tokens:
        if token.token_id != INVALID_TOKEN:
            state.record(token.token_id)
    if not state.params.greedy:
        state.return_unused(group.uniforms[len(result.tokens) :])
