"""The list of the engine's add-ons: all features beyond plain decoding."""

from __future__ import annotations

from neso.engine.addons.image_positions import RotaryPlan
from neso.engine.addons.input_embeddings import EmbeddingInputs, EmbeddingPlan
from neso.engine.addons.prompt_scores import PromptScores
from neso.engine.beams.addon import BeamSearchAddon
from neso.engine.core.addon import Addon
from neso.engine.core.step_plan import PlanPart
from neso.engine.guided.addon import GuidedDecodingAddon
from neso.engine.kv_transfer.addon import KvTransfer
from neso.engine.logits_processors.addon import LogitsProcessors
from neso.engine.lora.adapter import LoraPlan
from neso.engine.lora.manager import LoraManager
from neso.engine.pooling.addon import PoolingAddon
from neso.engine.pooling.pooler import Pooler, PoolingPlan
from neso.engine.runners.base import Runner
from neso.engine.spec_decode.draft import DraftTreePlan
from neso.engine.spec_decode.speculator import SpeculativeDecoding
from neso.engine.vision.image_encoder import ImageEncoder

PLAN_PARTS: tuple[type[PlanPart], ...] = (LoraPlan, EmbeddingPlan, PoolingPlan, DraftTreePlan, RotaryPlan)
"""Inputs of the add-ons in a step plan."""


def standard_addons(
    runner: Runner,
    *,
    pooler: Pooler | None = None,
    images: ImageEncoder | None = None,
    lora: LoraManager | None = None,
    guided: GuidedDecodingAddon | None = None,
    speculation: SpeculativeDecoding | None = None,
    processors: LogitsProcessors | None = None,
    kv_transfer: KvTransfer | None = None,
) -> list[Addon]:
    """Create all add-ons, in the order in which their hooks are called.

    Input embeddings come before add-ons that read the prompt tokens. Speculation is last, because `prepare` of the
    other add-ons may remove sequences from a step.
    """
    return [
        *([] if lora is None else [lora]),
        EmbeddingInputs(images),
        guided or GuidedDecodingAddon(),
        PoolingAddon(runner, pooler),
        PromptScores(),
        BeamSearchAddon(),
        processors or LogitsProcessors(),
        kv_transfer or KvTransfer(),
        speculation or SpeculativeDecoding(),
    ]
