"""Benchmarks of the package: `python -m benchmarks CASE`, see `benchmarks.runner`."""
