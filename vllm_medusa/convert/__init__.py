"""Heads from any known format to any other, exactly.

Reading is `vllm_medusa.heads`' own; what a format can't express is refused or, where it changes
nothing that the heads compute, added and noted (see `heads.Heads`).
"""
