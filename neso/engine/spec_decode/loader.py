"""Creation of the speculative-decoding add-on from the options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from neso.engine.core.attention_window import AttentionWindow
from neso.engine.errors import EngineError
from neso.engine.runners.base import CacheLayout, Runner, SpecRunner
from neso.engine.runners.registry import open_model
from neso.engine.spec_decode.config import MC_SIM_7B_63, SpeculationConfig, paths_of
from neso.engine.spec_decode.draft_length import DraftLength
from neso.engine.spec_decode.draft_model import DraftModelProposer
from neso.engine.spec_decode.medusa import MedusaHeads, MedusaProposer
from neso.engine.spec_decode.ngram import NgramProposer
from neso.engine.spec_decode.speculator import Proposer, SpeculativeDecoding
from neso.engine.specs.config_reader import UnsupportedModel
from neso.engine.weights.checkpoint import open_source
from neso.engine.weights.source import CheckpointError

if TYPE_CHECKING:
    from neso.engine.config import EngineConfig

MAX_VOCAB_PADDING = 1024
"""Maximum difference between the vocabulary sizes of a model and its draft model; some are padded to powers of two."""


def load_draft_runner(config: EngineConfig, runner: Runner) -> Runner | None:
    """Load the draft model named by the options, with the same settings as the model; None without a draft model.

    Raises `EngineError`.
    """
    options = config.speculation
    if options.method != "draft_model" or options.speculative_model is None:
        return None
    try:
        with open_source(options.speculative_model) as source:
            without_adapters = replace(config.runner_options, lora_slots=0, max_lora_rank=0)
            draft = open_model(source, config.runner, without_adapters, lambda max_position: max_position)
    except (CheckpointError, UnsupportedModel, ValueError) as error:
        raise EngineError(f"speculative_model: {error}") from None
    if abs(draft.vocab_size - runner.vocab_size) > MAX_VOCAB_PADDING:
        raise EngineError(
            f"speculative_model has a vocabulary of {draft.vocab_size} tokens, the model one of {runner.vocab_size}: "
            "they must have the same"
        )
    _check_window(runner.window, draft.window)
    return draft


def _check_window(model: AttentionWindow | None, draft: AttentionWindow | None) -> None:
    """Check that the draft model needs no blocks outside the model's window, because those are freed.

    Raises `EngineError`.
    """
    if model is not None and (draft is None or draft.size > model.size or draft.sinks > model.sinks):
        raise EngineError(
            "speculative_model attends to more of a sequence than the model, whose window it must have"
        )


def make_speculation(
    config: EngineConfig, runner: Runner, draft_runner: Runner | None, layout: CacheLayout
) -> SpeculativeDecoding:
    """Create the add-on for the options. Raises `EngineError` if the runner does not support them."""
    options = config.speculation
    if options.method is None:
        return SpeculativeDecoding()
    fixed = not options.adaptive_speculation
    if options.method == "medusa":
        medusa = _make_medusa(config, runner)
        rows_of = [medusa.num_nodes(depth) for depth in range(1, medusa.depth + 1)]
        return SpeculativeDecoding(medusa, DraftLength(medusa.depth, fixed=fixed, rows_of=rows_of))
    length = DraftLength(options.num_speculative_tokens, fixed=fixed)
    return SpeculativeDecoding(_make_proposer(options, runner, draft_runner, layout), length)


def _make_medusa(config: EngineConfig, runner: Runner) -> MedusaProposer:
    missing = {"tree_attention", "hidden_states"} - runner.capabilities
    if missing or not isinstance(runner, SpecRunner):
        raise EngineError("speculative medusa is not for this runner; there are reference, native and torch")
    try:
        paths = paths_of(config.speculation.medusa_choices or MC_SIM_7B_63)
        heads = MedusaHeads.load(
            Path(config.speculation.speculative_model or config.model),
            runner.spec.hidden_size,
            runner.vocab_size,
        )
        return MedusaProposer(runner, heads, paths)
    except (CheckpointError, ValueError) as error:
        raise EngineError(f"speculative medusa: {error}") from None


def _make_proposer(
    options: SpeculationConfig, runner: Runner, draft_runner: Runner | None, layout: CacheLayout
) -> Proposer:
    if draft_runner is not None:
        probabilistic = options.draft_sample_method == "probabilistic"
        return DraftModelProposer(draft_runner, layout, runner.vocab_size, probabilistic=probabilistic)
    return NgramProposer(options.prompt_lookup_min, options.prompt_lookup_max)
