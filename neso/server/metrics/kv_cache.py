"""How full the key-value caches are, from the gauges that backends of language models publish."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.samples import Sample

FAMILY = "nv_trt_llm_kv_cache_block_metrics"
LABEL = "kv_cache_block_type"


@dataclass(frozen=True, slots=True)
class KvCacheLoad:
    """`utilization` from 0 to 1; `max_tokens`: how many tokens fit in all."""

    utilization: float
    max_tokens: int

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> KvCacheLoad | None:
        """That of all models together, from the samples of `FAMILY`; None if no model tells all it takes."""
        models: defaultdict[frozenset[tuple[str, str]], dict[str, float]] = defaultdict(dict)
        for sample in samples:
            model = frozenset(item for item in sample.labels.items() if item[0] != LABEL)
            models[model][sample.labels.get(LABEL, "")] = sample.value
        whole = [blocks for blocks in models.values() if blocks.keys() >= {"tokens_per", "used", "max"}]
        if not whole:
            return None
        used, most = sum(blocks["used"] for blocks in whole), sum(blocks["max"] for blocks in whole)
        tokens = sum(blocks["max"] * blocks["tokens_per"] for blocks in whole)
        return cls(used / most if most else 0.0, int(tokens))
