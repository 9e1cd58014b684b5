"""Measurements of tree Medusa on a real vLLM: run them with `python -m benchmarks.<name>`."""
