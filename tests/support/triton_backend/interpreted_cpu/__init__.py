"""A Triton backend that compiles nothing; it has the attributes that vLLM reads on CPUs.

Triton finds it as an installed package's (the `dist-info` beside this folder), in every process
that has the folder above in its path: `support.triton_on_cpu` sees to that.
"""
