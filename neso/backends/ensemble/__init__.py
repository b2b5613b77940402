"""Ensembles: models defined as a dataflow graph of other models."""
