"""Batch generation over files of prompts: reading prompts, running an engine, storing results.

An engine accepts requests and returns new tokens; `engine` implements one with vLLM.
"""
