"""An agent: the model calls functions until it can answer.

python client.py --prompt "How's Nvidia doing?" -o 200 --verbose
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import OpenAI
from tools import FUNCTIONS, describe_report, describe_tools

MAX_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("-o", "--output-tokens", type=int, default=200, help="maximum tokens per step")
    parser.add_argument("--url", default="http://localhost:9000/v1")
    parser.add_argument("--model", help="default: the server's first model")
    parser.add_argument("--free-answer", action="store_true", help="do not constrain the answer")
    parser.add_argument("--verbose", action="store_true", help="show the steps")
    options = parser.parse_args()

    client = OpenAI(base_url=options.url, api_key="none")
    model = options.model or client.models.list().data[0].id
    answer = run(
        client,
        model,
        options.prompt,
        options.output_tokens,
        free_answer=options.free_answer,
        verbose=options.verbose,
    )
    print(answer)


def run(
    client: OpenAI,
    model: str,
    prompt: str,
    max_tokens: int = 200,
    *,
    free_answer: bool = False,
    verbose: bool = False,
) -> str:
    """Return the model's answer to `prompt`."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    reports: list[str] = []
    for step in range(1, MAX_STEPS + 1):
        constraint: dict[str, Any] = {"tool_choice": "required"}
        if reports:
            constraint = {} if free_answer else {"response_format": answer_format(reports)}
        reply = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=describe_tools(prompt),
            temperature=0,
            max_completion_tokens=max_tokens,
            parallel_tool_calls=False,
            **constraint,
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            name, arguments = call.function.name, json.loads(call.function.arguments)
            result = str(FUNCTIONS[name](**arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            reports.append(describe_report(name, arguments, result))
            if verbose:
                print(json.dumps({"step": str(step), "tool": name, "arguments": arguments}, indent=4))
                print(f"=====\nExecuting function: {name}({arguments})\nFunction response: {result}\n=====")
    return f"No answer after {MAX_STEPS} steps."


def answer_format(reports: list[str]) -> dict[str, Any]:
    """Return a response format that contains the functions' results; the model chooses only the wording."""
    return {"type": "structural_tag", "format": {"type": "regex", "pattern": " ".join(reports)}}


if __name__ == "__main__":
    main()
