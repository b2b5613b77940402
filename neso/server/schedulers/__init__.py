"""What stands between a model and its backend: who is executed when, and with whom."""
