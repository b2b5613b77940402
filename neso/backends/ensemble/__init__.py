"""Ensembles: dataflow graphs of other models."""
