"""Loads models into engines, and builds engine directories."""
