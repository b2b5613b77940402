"""What executes models: each folder is a backend, found by the name that a model configuration gives."""
