"""`pb_utils.ModelConfig`: what `auto_complete_config` may change of a configuration."""

from __future__ import annotations

import copy
from typing import Any

from google.protobuf import json_format  # type: ignore[import-untyped]

from neso.server.errors import InvalidArgument
from neso.server.model_config import config_to_dict

_COMPLETABLE = ("max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy")
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


def complete(config: Any, auto_complete: Any) -> None:
    """Run a model's `auto_complete_config` over a `ModelConfig` message. Raises `InvalidArgument`."""
    completed = auto_complete(ModelConfig(copy.deepcopy(config_to_dict(config))))
    if not isinstance(completed, ModelConfig):
        raise InvalidArgument(
            f"auto_complete_config function in model '{config.name}' must return a valid "
            "pb_utils.ModelConfig object"
        )
    values = {key: value for key, value in completed.as_dict().items() if key in _COMPLETABLE}
    try:
        message = json_format.ParseDict(values, type(config)())
    except json_format.ParseError as error:
        raise InvalidArgument(
            f"auto_complete_config function in model '{config.name}' returned a bad configuration: {error}"
        ) from None
    for field in _COMPLETABLE:
        if field in values:
            config.ClearField(field)
    config.MergeFrom(message)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
