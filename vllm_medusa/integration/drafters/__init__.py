"""Drafters inside vLLM's runners: the protocol, Medusa and Hydra heads, EAGLE and MTP.

CONTRIBUTING.md lists the places of a new drafter.
"""
