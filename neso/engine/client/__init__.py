"""Engine clients: `LLM` for an engine in the calling process, `AsyncEngine` for an engine process behind a channel."""
