"""Quantized forms that Hugging Face checkpoints come in."""
