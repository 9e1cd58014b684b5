"""A Triton backend that compiles nothing: what vLLM asks a backend of its CPUs about itself.

Triton finds it as an installed package's (the `dist-info` beside this folder), in every process
that has the folder above in its path: `support.triton_on_cpu` sees to that.
"""
