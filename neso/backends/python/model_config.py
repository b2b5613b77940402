"""`pb_utils.ModelConfig`: what `auto_complete_config` may change of a configuration."""

from __future__ import annotations

import copy
from typing import Any

from neso.backends.python.errors import TritonModelException

_TENSOR_KEYS = {"name", "data_type", "dims"}


class ModelConfig:
    """A configuration that a model completes: tensors, batching, and whether it is decoupled."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Raises `ValueError` when the user's configuration asks for more than the model can do."""
        given = self._config["max_batch_size"]
        if given > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in auto_complete_config function for "
                f"model '{self._config['name']}' specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Raises `ValueError` when another scheduler is configured."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._config:
                raise ValueError(
                    f"configuration specified '{scheduler}', but in auto_complete_config function for model "
                    f"'{self._config['name']}' tried to set 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: dict[str, Any]) -> None:
        """`{"decoupled": bool}`. Raises `ValueError` when the user's configuration says otherwise."""
        if unknown := set(policy) - {"decoupled"}:
            raise ValueError(f"model transaction policy has unknown properties {sorted(unknown)}")
        given = self._config.get("model_transaction_policy")
        if given is not None and given["decoupled"] != policy.get("decoupled", False):
            raise ValueError(
                "trying to change decoupled property in auto_complete_config for model "
                f"'{self._config['name']}', which is already set to '{given['decoupled']}'"
            )
        self._config["model_transaction_policy"] = {"decoupled": bool(policy.get("decoupled", False))}

    def add_input(self, tensor: dict[str, Any]) -> None:
        """`{"name", "data_type", "dims", "optional"?}`. Raises `ValueError` for another of the same name."""
        self._add("input", tensor, _TENSOR_KEYS | {"optional"})

    def add_output(self, tensor: dict[str, Any]) -> None:
        """`{"name", "data_type", "dims"}`. Raises `ValueError` for another of the same name."""
        self._add("output", tensor, _TENSOR_KEYS)

    def _add(self, kind: str, tensor: dict[str, Any], allowed: set[str]) -> None:
        if unknown := set(tensor) - allowed:
            raise ValueError(f"model {kind} has unknown properties {sorted(unknown)}")
        if missing := _TENSOR_KEYS - set(tensor):
            raise ValueError(f"model {kind} lacks the properties {sorted(missing)}")
        for given in self._config[kind]:
            if given["name"] != tensor["name"]:
                continue
            for key in ("data_type", "dims"):
                unset = not given[key] or given[key] == "TYPE_INVALID"
                if not unset and _plain(given[key]) != _plain(tensor[key]):
                    raise ValueError(
                        f"unable to add {kind} '{tensor['name']}' to model '{self._config['name']}': "
                        f"its configuration has {key} {given[key]}, the model {tensor[key]}"
                    )
                given[key] = tensor[key]
            return
        self._config[kind].append(dict(tensor))


def complete(config: dict[str, Any], model_class: Any) -> dict[str, Any]:
    """What a model's `auto_complete_config` makes of a configuration. Raises `TritonModelException`."""
    auto_complete = getattr(model_class, "auto_complete_config", None)
    if auto_complete is None:
        return config
    completed = auto_complete(ModelConfig(copy.deepcopy(config)))
    if not isinstance(completed, ModelConfig):
        raise TritonModelException(
            f"auto_complete_config function in model '{config['name']}' must return a valid "
            "pb_utils.ModelConfig object"
        )
    return completed.as_dict()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
