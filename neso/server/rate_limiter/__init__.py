"""Executions of all models share named resources."""
