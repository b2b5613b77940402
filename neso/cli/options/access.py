"""Who may use OpenAI's API, and how much."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from neso.cli.options.errors import OptionError, about
from neso.cli.options.kinds import PATH, integer
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

if TYPE_CHECKING:
    from neso.frontends.openai.access import AccessOptions, ApiKeys
    from neso.frontends.security import Restrictions

KEY_VARIABLE = "NESO_API_KEY"
_RESTRICTED = "openai-restricted-api"

ACCESS = Topic(
    "OpenAI: access",
    (
        Option(
            "api-key",
            f"OpenAI's API is answered only to who has one of the keys. The variable {KEY_VARIABLE} is one more.",
            repeated=True,
            metavar="KEY",
        ),
        Option(
            "api-key-file",
            "File of keys, one [NAME:]KEY a line; read again when it changes, and on SIGHUP.",
            PATH,
        ),
        Option(
            "api-key-open",
            "What needs no key: health, metrics, docs, or nothing.",
            default="health",
            metavar="GROUP[,GROUP...]",
        ),
        Option(
            "openai-requests-per-minute",
            "Most requests of a key in a minute; without keys, of an address.",
            integer(1),
            default_text="no limit",
        ),
        Option(
            "openai-tokens-per-minute",
            "Most tokens, of prompts and answers, in the same way.",
            integer(1),
            default_text="no limit",
        ),
        Option(
            "cors-allow-origin",
            "Web pages from there may use OpenAI's API (CORS); * is all.",
            repeated=True,
            metavar="ORIGIN",
        ),
        Option(
            _RESTRICTED,
            "Answer these groups of OpenAI's API only to requests with the header KEY of this VALUE: inference, "
            "model-repository, metrics, health. Also as three arguments: GROUPS KEY VALUE.",
            repeated=True,
            metavar="GROUP[,GROUP...]:KEY=VALUE",
        ),
    ),
)


def access_options(values: Values) -> AccessOptions:
    """Raises `OptionError`."""
    from neso.frontends.openai.access import AccessOptions, Quota
    from neso.frontends.openai.options import OPEN_GROUPS, UNLIMITED

    open_groups = tuple(name for name in values["api-key-open"].split(",") if name not in ("", "nothing"))
    for name in open_groups:
        if name not in OPEN_GROUPS:
            raise OptionError(
                f"--api-key-open: expected some of {', '.join(OPEN_GROUPS)}, or nothing, got '{name}'"
            )
    keys = _keys(values)
    if keys is not None:
        _warn_of_others(values)
    return AccessOptions(
        keys=keys,
        open_groups=open_groups,
        quota=Quota(
            values["openai-requests-per-minute"] or UNLIMITED,
            values["openai-tokens-per-minute"] or UNLIMITED,
        ),
        origins=tuple(values["cors-allow-origin"]),
    )


def _warn_of_others(values: Values) -> None:
    """Warn of the ways to the models that ask for no key."""
    settings = {"http": values["http-restricted-api"], "grpc": values["grpc-restricted-protocol"]}
    unrestricted = [
        f"--allow-{name}=false"
        for name, groups in settings.items()
        if values[f"allow-{name}"] and not any("inference" in text.partition(":")[0] for text in groups)
    ]
    if unrestricted:
        values.warnings.append(
            "API keys are asked for by OpenAI's API only, KServe's protocols answer everybody: restrict them, or use "
            + " ".join(unrestricted)
        )


def openai_restrictions(values: Values) -> Restrictions:
    """Of OpenAI's API alone. Raises `OptionError`."""
    from neso.frontends.openai.options import RESTRICTED_GROUPS
    from neso.frontends.security import Restrictions

    with about(f"--{_RESTRICTED}"):
        return Restrictions.parse(values[_RESTRICTED], known=RESTRICTED_GROUPS)


def _keys(values: Values) -> ApiKeys | None:
    """None if nobody needs one."""
    given, file = list(values["api-key"]), values["api-key-file"]
    if os.environ.get(KEY_VARIABLE, "").strip():
        given.append(os.environ[KEY_VARIABLE].strip())
    if not given and file is None:
        return None
    from neso.frontends.openai.access import ApiKeys

    with about("--api-key-file" if file is not None else "--api-key"):
        return ApiKeys(given, file)


def joined(arguments: list[str]) -> list[str]:
    """A command line in which three arguments, as Triton's front end for OpenAI's API takes them, are one."""
    flag = f"--{_RESTRICTED}"
    result: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == flag and len(rest) >= 3 and "=" not in rest[0]:
            groups, key, value, rest = rest[0], rest[1], rest[2], rest[3:]
            argument = f"{flag}={groups}:{key}={value}"
        result.append(argument)
    return result
