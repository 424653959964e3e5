"""Wheels that need no compiler where they are installed: pyspac's own, and one of the Python bindings."""
