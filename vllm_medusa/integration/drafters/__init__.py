"""Drafters inside vLLM's runners: the protocol, Medusa and Hydra heads, EAGLE and MTP.

CONTRIBUTING.md lists what a new drafter needs.
"""
