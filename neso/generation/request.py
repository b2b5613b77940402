"""A request for generated text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.generation.cache_retention import CacheRetention
from neso.generation.draft_tokens import DraftTokens
from neso.generation.lora import LoraRequest
from neso.generation.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it.

    `prompt` is text, or token ids that are taken as they are. `add_special_tokens` is False for text that a chat
    template has already furnished with them. `request_id` must be unique among the requests in flight; an empty
    one is replaced by the engine. Lower `priority` goes first. `queue_timeout_ms`: how long the request may wait until
    it is begun with; it is refused then. `lora`: the adapter to apply. `draft` is what the client guesses will follow.

    `detokenize` False: nobody needs the text of the tokens, it is empty. `stream` False: nobody waits for parts of the
    text; a model may give it as a whole. `retention`: how long its cached blocks shall be kept.

    Vectors in place of tokens, for models whose runner takes them (numpy, any float dtype):

    - `prompt_embeds` [P, hidden_size] is a whole prompt; `prompt` is empty then.
    - `prompt_embedding_table` [V, hidden_size] holds virtual tokens (P-tuning, arXiv 2103.10385): token id
      vocab_size + i stands for its row i. Before a prompt of text the whole table is put. `prompt_vocab_size` is V,
      given again to be checked.
    - `images`, in the order of the prompt's image tokens: the bytes of a file, its base64 or data: URL, a Pillow
      image, or uint8[height, width, 3].
    """

    prompt: str | list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""
    priority: int = 0
    add_special_tokens: bool = True
    cache_salt: str = ""
    lora: LoraRequest | None = None
    queue_timeout_ms: float | None = None
    prompt_embeds: npt.NDArray[np.floating] | None = None
    prompt_embedding_table: npt.NDArray[np.floating] | None = None
    prompt_vocab_size: int | None = None
    images: tuple[Any, ...] = ()
    draft: DraftTokens | None = None
    detokenize: bool = True
    stream: bool = True
    retention: CacheRetention | None = None
