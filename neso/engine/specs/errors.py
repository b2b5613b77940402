"""What can be wrong with a model's config.json."""

from __future__ import annotations


class SpecError(ValueError):
    """A config.json that gives no `DecoderSpec`. The message names the field and is fit for the user."""


class InvalidConfig(SpecError):
    """A field is missing, has the wrong type, or contradicts another."""


class UnsupportedModel(SpecError):
    """The config is sound, but asks for an architecture or a feature that the engine does not have."""
