"""Loading of a model into an engine, and building of engine directories."""
