"""The response cache."""

from __future__ import annotations

from neso.cli.options.errors import OptionError
from neso.cli.options.kinds import PATH, integer
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

CACHE = Topic(
    "Response cache",
    (
        Option(
            "cache-config",
            "Cache the responses of models that enable it, in so many bytes: local,size=BYTES.",
            default_text="no cache",
            metavar="CACHE,KEY=VALUE",
            repeated=True,
        ),
        Option(
            "response-cache-byte-size", "Deprecated: the same as --cache-config=local,size=BYTES.", integer(0)
        ),
        Option(
            "cache-directory",
            "Where tritonserver looks for shared libraries of caches.",
            PATH,
            ignored="caches are part of the package",
        ),
    ),
)


def cache_size(values: Values) -> int:
    """Bytes of the response cache, 0 for none. Raises `OptionError`."""
    settings: list[str] = values["cache-config"]
    if not settings:
        return values["response-cache-byte-size"] or 0
    if values.given("response-cache-byte-size"):
        raise OptionError("--cache-config and --response-cache-byte-size cannot be given together")
    size = 0
    for setting in settings:
        cache, _, pair = setting.partition(",")
        key, _, value = pair.partition("=")
        if cache != "local":
            raise OptionError(f"--cache-config: the only cache there is is 'local', got '{setting}'")
        if key != "size" or not value.isdecimal():
            raise OptionError(f"--cache-config: expected local,size=BYTES, got '{setting}'")
        size = int(value)
    return size
