"""Adapter for vLLM's V2 model runner, which is used unmodified: none of its methods is overridden.

V2 is built from replaceable parts. For each of them, this table lists what replaces it here, and
what changes because drafts are a tree instead of a *chain*:

    part of vLLM                      replaced by                 chain -> tree
    --------------------------------  --------------------------  ---------------------------------
    SpeculativeConfig                 options.TreeSpeculative-    drafts are tree nodes, parents
                                      Config                      first; a prefix is still a tree
    Worker.init_device                worker.MedusaWorker         installs the two below
    init_speculator (patched)         speculator.TreeSpeculator   the next drafts follow the last
                                                                  accepted *node*, not the last
                                                                  row that was not rejected
    AttentionBackendEnum              integration.attention       a node sees its ancestors only
    model.get_model_state_cls         state.TreeModelState
      prepare_attn                      RequestTrees.begin          the rows of each node
      prepare_inputs                    RequestTrees.               RoPE by depth; slots by index
                                          write_positions
      custom_sampler                    sampler.TreeSampler       a token sampled at every node, and
                                                                  the walk down (sampler.launch)
      postprocess_state                 compaction                compacts the accepted path's KV

With an EAGLE drafter the speculator is eagle_drafter.EagleTreeSpeculator: its prefill takes the
accepted *path*, not all of the target's rows as in vLLM, and its levels are trees' (`eagle_trees`).

A step, in V2's order: its own preparation puts node i into slot base + i (which is also
right for trees with parents first), then `prepare_attn`, `prepare_inputs`, the forward pass,
the sampler, vLLM's counters (which only need the *number* of accepted drafts), `postprocess_state`
and `propose`. Everything stays on the device: nothing here waits for it, so that the next step can
be scheduled while this one runs (async scheduling).
"""
