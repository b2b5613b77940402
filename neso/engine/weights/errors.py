"""What can be wrong with the files of a model."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint that cannot be read, or lacks what the model needs. The message names file and tensor."""


class ModelNotFound(Exception):
    """Neither a local directory nor a model of the Hugging Face hub that can be reached."""
