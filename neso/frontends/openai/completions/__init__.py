"""Text completions: prompts of all kinds, continued."""
