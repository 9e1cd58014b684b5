"""Heads and EAGLE-3 drafters in the layouts of other servers, every tensor bit for bit.

Reading is `vllm_medusa.heads`' own. What a layout has no place for is refused; what it needs
besides, and what changes nothing that the heads compute, is added and said.
"""
