"""Convert heads and EAGLE-3 drafters to other servers' layouts, with unchanged tensors.

`vllm_medusa.heads` reads the source. Tensors that a layout does not support are refused; missing
ones that do not change the heads' output are added and reported.
"""
