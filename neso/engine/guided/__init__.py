"""Guided decoding: constrains output to a JSON schema, regular expression or grammar with token masks."""
