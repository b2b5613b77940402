"""Output that matches a JSON schema, with the generate endpoint."""

from __future__ import annotations

import argparse
import json
import urllib.request

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="neso-pilot")
    options = parser.parse_args()

    body = {
        "text_input": "Plan a trip.",
        "parameters": {"guided_json": json.dumps(SCHEMA), "max_tokens": 100, "temperature": 0},
    }
    request = urllib.request.Request(
        f"{options.url}/v2/models/{options.model}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        print(json.loads(json.load(response)["text_output"]))


if __name__ == "__main__":
    main()
