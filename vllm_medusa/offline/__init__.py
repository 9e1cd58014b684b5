"""Batch generation over files of prompts: reading them, driving an engine, keeping the results.

An engine is anything that takes requests and hands back new tokens; `engine` makes one of vLLM.
"""
