"""Load: when requests start, independent of how they are sent."""
