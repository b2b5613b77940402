"""Backend `tensorflow`: SavedModel and GraphDef models."""

import contextlib

with contextlib.suppress(ImportError):
    import triton  # noqa: F401  The process crashes if it imports Triton's compiler after TensorFlow.
