"""Adapter for vLLM's V1 model runner."""
