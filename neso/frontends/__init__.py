"""Front ends: the wire formats. They parse, call the core and write."""
