"""Speculative decoding: propose draft tokens cheaply and verify several of them in one step."""
