"""The tree's forward pass: where each node stands and which keys it attends.

A tree of n nodes verified behind a context of c tokens occupies the cache slots c .. c + n - 1 in
node order, while node i stands at *position* c + depth(i): siblings share a position, not a slot.
`positions` computes the positions, `layout` knows how vLLM packs keys and values into its CPU
blocks, `cpu` plans one step and runs each layer by a kernel in C++ (`attention.cpp`); `paged` and
`dispatch` are attention over the paged cache of GPUs. A node's attention mask is its row of
`TreeBatch.ancestors` (made in `tree.packing`) behind the whole context; nodes that an EAGLE drafter
expands get theirs from `worker.eagle_trees`. `reference` is the computation in torch, of plain
arguments, that all of them are tested against.
"""
