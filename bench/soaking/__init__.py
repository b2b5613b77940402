"""The parts of bench/soak.py."""
