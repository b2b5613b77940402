"""What is wrong with the options that were given."""

from __future__ import annotations


class OptionError(Exception):
    """The message names the option, and the place in the configuration file where it came from one."""
