"""Model loading and unloading, and the model table."""
