"""Code shared by several test folders, importable through ``pythonpath`` in pyproject.toml."""
