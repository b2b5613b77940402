"""Engine clients: `LLM` in the process of the caller, `AsyncEngine` over a channel to an engine process."""
