"""`neso serve`: the command, generated from the flags that the options declare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neso.cli.flag_command import FlagCommand, command_function, help_text
from neso.cli.serve_flags import FLAGS, TOPICS

SUMMARY = "Serve models over HTTP, gRPC and the OpenAI API."
_MODELS = (
    "Checkpoint in Hugging Face's format: a directory, an org/name on the hub, or NAME=CHECKPOINT to set the served "
    "name. Default without any MODEL or model repository: the small model that is part of the package."
)
_RESTRICTED_API = "--openai-restricted-api"


class ServeCommand(FlagCommand):
    @staticmethod
    def help_of() -> str:
        return help_text("neso serve [OPTIONS] [MODEL]...", SUMMARY, {"MODEL": _MODELS, **TOPICS})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, join_restricted_api(args))


def serve_function() -> Callable[..., None]:
    """Create the function of the command."""

    def run(texts: dict[str, list[str]]) -> int:
        from neso.cli.server_process import run

        return run(texts)

    return command_function(FLAGS, run, "models")


def join_restricted_api(arguments: list[str]) -> list[str]:
    """Join the three arguments `GROUPS KEY VALUE` of Triton's OpenAI frontend into one."""
    result: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == _RESTRICTED_API and len(rest) >= 3 and "=" not in rest[0]:
            groups, key, value, rest = rest[0], rest[1], rest[2], rest[3:]
            argument = f"{_RESTRICTED_API}={groups}:{key}={value}"
        result.append(argument)
    return result
