"""Responses that were given before, by what was asked."""
