"""Transfer of KV-cache blocks between engines: one computes a prompt, another generates the text."""
