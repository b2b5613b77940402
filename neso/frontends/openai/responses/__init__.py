"""OpenAI's Responses API, built on the prompts, sampling and parsers of chat completions."""
