"""The endpoints named in docs/guides/from-vllm-serve.md exist."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "from-vllm-serve.md"
PORTS = {"8000": "http", "9000": "openai", "8002": "metrics"}


def route_exists(server, protocol: str, path: str) -> bool:
    """Return whether any method is allowed."""
    body = urllib.request.Request(server.url(path, protocol), b"{}")
    for request in (server.url(path, protocol), body):
        try:
            with urllib.request.urlopen(request, timeout=10):
                return True
        except urllib.error.HTTPError as error:
            if error.code not in (404, 413):  # the metrics port accepts no bodies
                return True
    return False


def test_endpoints(server):
    section = PAGE.read_text().partition("\n## Endpoints\n")[2].partition("\n## ")[0]
    checked = 0
    for paths, where in re.findall(r"^\| (`.+`) \| (.+) \|$", section, re.M):
        named = set() if where == "not there" else set(re.findall(r"\d{4}", where))
        for path in re.findall(r"`(/[^`]+)`", paths):
            for port, protocol in PORTS.items():
                assert route_exists(server, protocol, path) == (port in named), (path, port)
                checked += 1
    assert checked > 40
