"""Output as a pydantic model, with the OpenAI API."""

from __future__ import annotations

import argparse
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Trip(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)
    by_train: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:9000/v1")
    parser.add_argument("--model", default="neso-pilot")
    options = parser.parse_args()

    client = OpenAI(base_url=options.url, api_key="none")
    reply = client.chat.completions.parse(
        model=options.model,
        messages=[{"role": "user", "content": "Plan a trip."}],
        response_format=Trip,
        temperature=0,
        max_completion_tokens=100,
    )
    trip = reply.choices[0].message.parsed
    assert trip is not None
    print(f"{trip.city}, {trip.days} days, {'by train' if trip.by_train else 'by plane'}")


if __name__ == "__main__":
    main()
