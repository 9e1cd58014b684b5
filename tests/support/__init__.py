"""What several test folders share; on the path through pyproject's ``pythonpath``."""
