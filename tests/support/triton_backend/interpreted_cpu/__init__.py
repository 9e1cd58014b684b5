"""A Triton backend that compiles nothing; it has the attributes that vLLM reads on CPUs.

Triton finds it like an installed package (by the `dist-info` next to this folder), in every process
with the parent folder on its path: `support.triton_on_cpu` adds it.
"""
