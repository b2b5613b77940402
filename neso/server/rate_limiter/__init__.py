"""Rate limiter: the executions of all models share named resources."""
