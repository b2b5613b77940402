"""Model configurations (`config.pbtxt`)."""
