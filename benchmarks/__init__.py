"""What the package is measured with: `python -m benchmarks CASE`, see `benchmarks.runner`."""
