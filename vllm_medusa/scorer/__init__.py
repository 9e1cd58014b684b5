"""The tree's forward pass: the position of each node and the keys that it attends to.

A tree of n nodes verified after a context of c tokens occupies the cache slots c .. c + n - 1 in
node order, while node i has *position* c + depth(i): siblings share a position, not a slot.
`step` lays out the rows and positions, `layout` describes how vLLM packs keys and values into its
CPU blocks, `cpu` plans one step and runs each layer with a C++ kernel (`attention.cpp`); `paged`
and `launch` are attention over the paged cache of GPUs. A node's attention mask is its row of
`TreeBatch.ancestors` (from `tree.ancestors`) after the whole context; nodes that an EAGLE drafter
expands get theirs from `integration.drafters.eagle_trees`.
"""
