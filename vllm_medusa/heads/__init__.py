"""Medusa and Hydra heads, EAGLE-3 drafters, and their checkpoints.

Running heads needs only torch; checkpoints also need safetensors.
"""
