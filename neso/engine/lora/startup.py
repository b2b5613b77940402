"""Loading of the adapters that are configured at startup."""

from __future__ import annotations

from neso.engine.errors import EngineError
from neso.engine.lora.config import LoraConfig
from neso.engine.lora.manager import LoraManager
from neso.engine.runners.base import Runner, SpecRunner
from neso.generation.request import LoraRequest


def open_adapters(config: LoraConfig, runner: Runner) -> LoraManager | None:
    """Load `lora_modules`; None if LoRA is disabled. Raises `EngineError` if an adapter cannot be loaded."""
    if not config.enabled:
        return None
    if "lora" not in runner.capabilities or not isinstance(runner, SpecRunner):
        if config.enable_lora == "auto" and not config.lora_modules:
            return None
        raise EngineError(f"enable_lora: {runner.name} cannot apply adapters")
    manager = LoraManager(config, runner)
    for name, path in config.lora_modules.items():
        manager.load(LoraRequest(name=name, path=path))
    while manager.has_work():
        manager.wait(timeout=1.0)
        for loaded in manager.take_loaded():
            if loaded.error is not None:
                raise EngineError(str(loaded.error))
    return manager
