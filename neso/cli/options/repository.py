"""Which models are served, and from where."""

from __future__ import annotations

from typing import Any

from neso.cli.options.errors import OptionError
from neso.cli.options.kinds import BOOLEAN, FLAG, LOCATION, PATH, choice, integer, number
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

REPOSITORY = Topic(
    "Models",
    (
        Option(
            "model-repository",
            "Directory of models in Triton's layout, or the URI of a folder in a bucket.",
            LOCATION,
            aliases=("model-store",),
            repeated=True,
        ),
        Option("served-model-name", "Name of the MODEL, the same as NAME=MODEL.", metavar="NAME"),
        Option(
            "model-control-mode",
            "none: load all models at start. explicit: those of --load-model, then by request. poll: what the "
            "repositories hold at the moment.",
            choice("none", "explicit", "poll"),
            "none",
        ),
        Option(
            "repository-poll-secs",
            "Seconds between two looks at the repositories, in mode poll; 0: only when asked.",
            number(0),
            15,
        ),
        Option("load-model", "Model to load at start in explicit mode; * alone for all.", repeated=True),
        Option(
            "model-config-name",
            "Read configs/NAME.pbtxt of each model that has it in place of config.pbtxt.",
            default="",
            metavar="NAME",
        ),
        Option("disable-auto-complete-config", "Take config.pbtxt as it is.", FLAG),
        Option(
            "strict-model-config", "Deprecated: true is the same as --disable-auto-complete-config.", BOOLEAN
        ),
        Option(
            "strict-readiness", "Ready only while every model that was to be loaded is ready.", BOOLEAN, True
        ),
        Option("exit-on-error", "Exit if a model cannot be loaded at start.", BOOLEAN, False),
        Option("model-load-thread-count", "Models that load at the same time.", integer(1), 4),
        Option("model-load-retry-count", "How often to retry a failed load.", integer(0), 0),
        Option(
            "model-namespacing",
            "Serve models of the same name from several repositories.",
            BOOLEAN,
            False,
        ),
        Option(
            "backend-config",
            "Setting of a backend.",
            repeated=True,
            metavar="BACKEND,KEY=VALUE",
        ),
        Option(
            "backend-directory",
            "Where tritonserver looks for shared libraries of backends.",
            PATH,
            ignored="backends are Python code of the package or of the model's folder",
        ),
        Option(
            "repoagent-directory",
            "Where tritonserver looks for repository agents.",
            PATH,
            ignored="repository agents are part of the package",
        ),
    ),
)


def repository_options(values: Values) -> dict[str, Any]:
    """Fields of `ServerOptions`. Raises `OptionError`, `ServerError`."""
    from neso.server.options import ModelControlMode

    return {
        "model_repository": tuple(values["model-repository"]),
        "model_control_mode": ModelControlMode(values["model-control-mode"]),
        "startup_models": tuple(values["load-model"]),
        "repository_poll_secs": values["repository-poll-secs"],
        "model_config_name": values["model-config-name"],
        "model_namespacing": values["model-namespacing"],
        "model_load_thread_count": values["model-load-thread-count"],
        "model_load_retry_count": values["model-load-retry-count"],
        "strict_readiness": values["strict-readiness"],
        "exit_on_error": values["exit-on-error"],
        "disable_auto_complete_config": bool(
            values["disable-auto-complete-config"] or values["strict-model-config"]
        ),
        "backend_config": _backend_config(values["backend-config"]),
    }


def _backend_config(settings: list[str]) -> dict[str, dict[str, str]]:
    result: dict[str, dict[str, str]] = {}
    for setting in settings:
        backend, comma, pair = setting.partition(",")
        key, equals, value = pair.partition("=")
        if not (backend and comma and key and equals):
            raise OptionError(f"--backend-config: expected BACKEND,KEY=VALUE, got '{setting}'")
        result.setdefault(backend, {})[key] = value
    return result
