"""Loading and unloading of models, and the table of models."""
