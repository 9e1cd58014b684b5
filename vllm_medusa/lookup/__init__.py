"""Continuations found in a request's own prompt and output, as candidates of its draft tree."""
