"""Batch generation over files of prompts: reading them, driving an engine, keeping the results.

Knows no model and no vLLM: an engine is anything that takes requests and hands back new tokens.
"""
