"""Lookup: continuations found in a request's own prompt and output, as nodes of its draft tree."""
